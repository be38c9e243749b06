"""Where the supported releases of Megatron-Core differ: 0.16.1 for Python 3.11, 0.19 for newer ones.

Imported only where Megatron is.
"""

from functools import partial
from typing import Any

from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor


def do_without_engine() -> None:
    """Makes layers do without Transformer Engine.

    Routers take torch's products: 0.16.1 names the engine's without defining them where it is missing, and asks latent
    attention for classes of it. Latent attention would also put rotary embeddings on a GPU; `LatentAttention` has its own.
    """
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    multi_latent_attention.RotaryEmbedding = lambda *_, **__: None


def use_expert_parts(parts: Any, experts: type, router: type) -> None:
    """Sets the classes of experts and router in a layer's specification, if the layer has experts.

    A specification of an MLP is a `ModuleSpec` in 0.16, and a partial constructor in 0.19.
    """
    mlp = parts.mlp
    if isinstance(mlp, partial):
        if mlp.func is MoELayer:
            own = mlp.keywords["submodules"]
            own.router, own.experts = router, partial(experts, **own.experts.keywords)
    elif mlp.module is MoELayer:
        mlp.submodules.router, mlp.submodules.experts.module = router, experts


def gradients_for_norm(optimizer: Any) -> list[Tensor]:
    """Returns the gradients that count for the norm on this worker: none that a tensor-parallel peer also has."""
    named = "get_grads_for_grad_norm" if hasattr(optimizer, "get_grads_for_grad_norm") else "get_main_grads_for_grad_norm"
    gradients: list[Tensor] = getattr(optimizer, named)()
    return gradients
