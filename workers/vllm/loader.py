"""vLLM's checkpoint loader, extended to keep the parameters as they are before post-processing.

After loading, vLLM converts each layer's weights for its kernels: the CPU backend packs linear weights into oneDNN's format
and drops the originals, and some MoE kernels shuffle them. A refit writes the originals, in vLLM's documented
fused layout (see `destinations.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagrl.workers.vllm.quantization import quantize_checkpoint

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "dagrl"
_ATTRIBUTE = "dagrl_loaded_parameters"


@dataclass(frozen=True)
class LoadedParameter:
    """A parameter as loaded from the checkpoint, and a sample of its content that reveals later changes."""

    tensor: torch.Tensor
    sample: torch.Tensor

    def unchanged(self) -> bool:
        """Whether the sampled content is unchanged since loading."""
        return _sample(self.tensor).equal(self.sample)


def register_loader(quantized: frozenset[str] = frozenset()) -> None:
    """Registers the load format for the next engine (`vllm.model_executor.model_loader.register_model_loader`).

    Parameters named in `quantized` are quantized while the checkpoint is read.
    """
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class KeepingLoader(DefaultModelLoader):  # type: ignore[misc]
        def __init__(self, load_config: LoadConfig) -> None:
            load_config.load_format = "auto"
            load_config.use_tqdm_on_load = False
            super().__init__(load_config)

        def get_all_weights(self, model_config: object, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
            device = next(model.parameters()).device
            return quantize_checkpoint(super().get_all_weights(model_config, model), quantized, device)

        def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
            super().load_weights(model, model_config)
            named = model.named_parameters(remove_duplicate=False)
            loaded = {name: LoadedParameter(tensor.data, _sample(tensor.data)) for name, tensor in named}
            object.__setattr__(model, _ATTRIBUTE, loaded)

    register_model_loader(LOAD_FORMAT)(KeepingLoader)


def take_loaded_parameters(model: torch.nn.Module) -> dict[str, LoadedParameter]:
    """Returns the parameters as loaded, by vLLM's names, and removes them from the model."""
    loaded: dict[str, LoadedParameter] = model.__dict__.pop(_ATTRIBUTE)
    return loaded


def _sample(tensor: torch.Tensor, elements: int = 1024) -> torch.Tensor:
    import torch

    flat = tensor.detach().reshape(-1)
    raw = flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat  # few kernels know FP8
    return raw[:: max(1, raw.numel() // elements)].clone()
