"""Features of the installed vLLM, detected instead of derived from its version. All version differences are handled here.

The rest of this package uses only what vLLM 0.26 to 0.33 have in common (checked in the sources of 0.26.0, 0.29.0, 0.32.0
and 0.33.0): the engine arguments that we set and the methods of engine, executor and worker that we call. Tested: 0.26 on
GPUs; 0.27, 0.29, 0.31 and 0.32 on CPUs. One test fails with 0.27: a float32 log-probability differs from transformers' by
1.02e-5 instead of 1e-5. Differences:

- `wake_up` returns whether all memory is back in 0.32, and nothing in 0.29. We do not use the result.
- vLLM's own weight versions (`set_weight_version`) exist in 0.29, not in 0.26. We count versions ourselves.
- An executor's `shutdown` destroys vLLM's process groups since 0.33. In our case they end with the process.
- The second model runner serves some architectures in 0.26, and all of them in 0.32 if Triton is available. Requests,
  outputs and weights are the same in both.
- The CPU build has every field of `EngineArgs`, but no sleep mode, CUDA graphs or asynchronous scheduling.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dagrl.attributes import setting
from dagrl.data.media import load_processor, without_videos
from dagrl.errors import ConfigError, MissingDependencyError
from dagrl.workers.vllm.burst_graphs import RELEASES

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from vllm import LLMEngine, SamplingParams
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput

TORCHVISION = "torchvision"

SLEEP_TAGS = ("weights", "kv_cache")
"""Kinds of memory that a sleeping engine has released, and that can be restored one at a time."""


def engine_config(arguments: Mapping[str, Any]) -> VllmConfig:
    """Builds vLLM's configuration from `EngineArgs` fields. Raises MissingDependencyError if this vLLM lacks one.

    On GPUs a step has at most as many tokens as one of vLLM's `LLM`, unless the fields say how many.
    """
    from vllm import EngineArgs, __version__
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    lacking = sorted(arguments.keys() - {field.name for field in dataclasses.fields(EngineArgs)})
    if lacking:
        raise MissingDependencyError(
            f"vLLM {__version__} lacks the engine arguments {', '.join(lacking)}; install vLLM 0.26 to 0.33 "
            "(dagrl[vllm]), or correct policy.generation.vllm_kwargs"
        )
    return EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS if current_platform.is_cuda() else None)


def only_known(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that this vLLM's `EngineArgs` has."""
    from vllm import EngineArgs

    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    return {name: value for name, value in arguments.items() if name in fields}


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Lets vLLM's models be imported in this block where torchvision is missing.

    No wheel of it on PyPI fits torch's CPU build. vLLM imports classes that scale images with it, but then takes those of
    Pillow, as training does.
    """
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        yield
        return
    names = [TORCHVISION, *(f"{TORCHVISION}.{name}" for name in ("transforms", "transforms.v2", "transforms.v2.functional"))]
    modules = {name: ModuleType(name) for name in names}
    for parent, child in pairwise(names):
        setattr(modules[parent], child.rpartition(".")[2], modules[child])
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def process_images_alone(model: Any) -> None:
    """Makes a model class of vLLM load its processor without the part for videos, which transformers has by torchvision."""
    from transformers import ProcessorMixin
    from transformers.utils import is_torchvision_available
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing.context import InputProcessingContext

    factories = getattr(model, "_processor_factory", None)
    if factories is None or is_torchvision_available():
        return

    class ImagesContext(InputProcessingContext):  # type: ignore[misc]
        def get_hf_processor(self, kind: Any = ProcessorMixin, /, **settings: Any) -> Any:
            named = isinstance(kind, type) and kind is not ProcessorMixin
            own = without_videos(kind) if named else type(load_processor(Path(self.model_config.model)))
            return super().get_hf_processor(own, **settings)

    def info(context: InputProcessingContext) -> Any:
        return factories.info(ImagesContext(context.model_config, context.tokenizer))

    register = MULTIMODAL_REGISTRY.register_processor
    register(factories.processor, info=info, dummy_inputs=factories.dummy_inputs)(model)


def processed_image(processor: Any, name: str, image: Image) -> Any:
    """Returns the tensors that vLLM's multimodal processor makes of an image for its model, without any prompt.

    The processor's public method also looks for the image's place in a text, which our tokens need not have. `name` stands
    in for a hash of the image.
    """
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    items = processor.info.parse_mm_data({"image": [image]})
    made = processor._apply_hf_processor(ProcessorInputs([], items, {"image": [name]}), TimingContext(enabled=False))
    found = made if hasattr(made, "kwargs") else made[1]  # 0.26 puts it between prompt tokens and a flag
    return found.kwargs["image"][0]


def keep_covered_images() -> None:
    """Leaves requests the tensors of images that a cached prefix covers, which the scheduler drops since 0.32.

    A preempted request computes its images again, and has only what it was sent first.
    """
    from vllm.v1.core.sched import output

    if hasattr(output, "strip_covered_mm_data"):
        output.strip_covered_mm_data = lambda features, *_, **__: features


def item_bytes(item: Any) -> int:
    """Returns the bytes of the tensors of `processed_image`."""
    return sum(getattr(element.data, "nbytes", 0) for element in item.values())


def names_in_vllm(architecture: type[Any]) -> Callable[[str], str]:
    """Returns what gives the name of a checkpoint's parameter in a model class of vLLM, as if no layers were fused."""
    mapper = getattr(architecture, "hf_to_vllm_mapper", None)
    if mapper is None:
        return str
    if hasattr(mapper, "orig_to_new_stacked"):  # since 0.32, names of fused layers too
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
    return lambda name: mapper._map_name(name) or name


def require_batch_invariance() -> None:
    """Raises ConfigError if this GPU or this vLLM lacks batch-invariant kernels. Those on CPUs are."""
    import torch
    from vllm import __version__, envs

    if not torch.cuda.is_available():
        return
    if not hasattr(envs, "VLLM_BATCH_INVARIANT"):
        raise ConfigError(f"policy.deterministic is true, and vLLM {__version__} has no batch-invariant kernels; upgrade it")
    capability = torch.cuda.get_device_capability()
    if capability < (9, 0):
        device = f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
        raise ConfigError(
            f"policy.deterministic is true, and vLLM's batch-invariant kernels need compute capability 9.0; {device}. "
            "Set it to false, or use other GPUs"
        )
    _mend_fused_norm()


def _mend_fused_norm() -> None:
    """Adds residuals outside the norm in batch-invariant mode, where engines do not compile the model.

    The fused kernel of vLLM 0.26 sums a row in another order once 256 tokens are in a step (`fused_add_rms_norm` in
    csrc/layernorm_kernels.cu).
    """
    from vllm.model_executor.layers import layernorm

    norm = layernorm.rms_norm_batch_invariant

    def unfused(x: Tensor, weight: Tensor | None, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
        if residual is None:
            return norm(x, weight, eps)
        residual.add_(x)
        return norm(residual, weight, eps), residual

    layernorm.rms_norm_batch_invariant = unfused


@contextmanager
def warm_up_sampling(parameters: SamplingParams) -> Iterator[None]:
    """Lets engines that start in this block compile only the sampling kernels that `parameters` need, none for grammars.

    vLLM's second model runner would compile those of every sampling feature, one after the other. A request that needs
    another kernel has it compiled then. Nor are Inductor's patterns made before something is compiled.
    No effect on CPUs, and in releases without this warm-up.
    """
    from vllm import SamplingParams
    from vllm.compilation import compiler_interface
    from vllm.v1.worker import gpu_worker

    warm_up: Any = getattr(gpu_worker, "warmup_kernels", None)

    def without_grammar(model_runner: Any, execute_model: Callable[..., Any], sample_tokens: Callable[..., Any]) -> None:
        warm_up(model_runner, execute_model, lambda grammar: sample_tokens(None))

    ours = (
        (SamplingParams, "for_sampler_warmup", staticmethod(lambda: parameters)),
        (gpu_worker, "warmup_kernels", without_grammar),
        (compiler_interface, "trigger_inductor_lazy_init", lambda device=None: None),
    )
    changed = [(owner, name, function, vars(owner)[name]) for owner, name, function in ours if name in vars(owner)]
    for owner, name, function, _ in changed:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, _, theirs in changed:
            setattr(owner, name, theirs)


@functools.cache
def sample_by_our_kernels() -> None:
    """Makes samplers of vLLM's second model runner draw and score tokens by our kernels (`sampling_kernels`).

    No effect on CPUs, and in releases whose sampler calls other functions. Tokens stand in for their ranks, which nothing
    reads (`SampledLogprobs`).
    """
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import sampler

    from dagrl.workers.vllm.sampling_kernels import sampled_scores, sampled_tokens

    drawn: Any = getattr(sampler, "gumbel_sample", None)
    scored: Any = getattr(sampler, "compute_topk_scores", None)
    last: list[tuple[Tensor, ...]] = [()]  # logits, tokens and log-probabilities of the last draw

    def draw(logits: Tensor, *state: Tensor, apply_temperature: bool, use_fp64: bool, **options: Any) -> Any:
        if apply_temperature or use_fp64 or options:
            return drawn(logits, *state, apply_temperature=apply_temperature, use_fp64=use_fp64, **options)
        tokens, logprobs = sampled_tokens(logits, *state)
        last[0] = logits, tokens, logprobs
        return tokens

    def scores(logits: Tensor, others: int, sampled: Tensor, groups: Any = None, **options: Any) -> Any:
        if others or groups is not None or options.get("max_per_req_token_ids") or options.get("logits_mode"):
            return scored(logits, others, sampled, groups, **options)
        known, last[0] = last[0], ()
        same = len(known) == 3 and known[0] is logits and known[1] is sampled
        return LogprobsTensors(sampled.unsqueeze(-1), known[2] if same else sampled_scores(logits, sampled), sampled)

    if drawn is not None and vllm.__version__.startswith(RELEASES):
        sampler.gumbel_sample = draw
    if scored is not None:
        sampler.compute_topk_scores = scores


@functools.cache
def reset_cached_blocks_alone() -> None:
    """Makes resets of vLLM's prefix cache visit the cached blocks alone, if they are few. No other block has a hash.

    Blocks with reuse watchers (since 0.32) are looked up in the whole list.
    """
    from vllm.v1.core.block_pool import BlockPool

    whole: Callable[[Any], bool] = BlockPool.reset_prefix_cache

    def reset(pool: Any) -> bool:
        cached = getattr(pool.cached_block_hash_to_block, "_cache", None)
        if cached is None or 4 * len(cached) > len(pool.blocks) or getattr(pool, "_reuse_watchers", None):
            return whole(pool)
        found = (entry.values() if isinstance(entry, dict) else (entry,) for entry in cached.values())
        with setting(pool, blocks=chain.from_iterable(found)):
            return whole(pool)

    BlockPool.reset_prefix_cache = reset


def attend_decodes(config: VllmConfig) -> None:
    """Makes the next engine's FlashAttention backend compute decode steps by our kernel (`decode_attention`) on Hopper GPUs.

    Not in batch-invariant mode, whose results must not depend on the batch, and not where a CUDA graph of a decode step also
    serves prompts.
    """
    from vllm import envs
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() and current_platform.is_device_capability(90)):
        return
    from vllm.v1.attention.backends import flash_attn

    theirs = _flash_attention()
    flash_attn.flash_attn_varlen_func = theirs
    mixed = config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL
    if mixed or envs.VLLM_BATCH_INVARIANT or flash_attn.get_flash_attn_version() != 3:
        return
    from dagrl.workers.vllm.decode_attention import decode_attention, takes

    def attention(*values: Any, **call: Any) -> Any:
        if values or not takes(call):
            return theirs(*values, **call)
        pages, lengths = call["block_table"], call["seqused_k"]
        rest = pages, lengths, call["softmax_scale"], call["max_seqlen_k"], call["out"]
        return decode_attention(call["q"], call["k"], call["v"], *rest)

    flash_attn.flash_attn_varlen_func = attention


@functools.cache
def _flash_attention() -> Callable[..., Any]:
    """vLLM's own function."""
    from vllm.v1.attention.backends import flash_attn

    own: Callable[..., Any] = flash_attn.flash_attn_varlen_func
    return own


def can_sleep() -> bool:
    """Returns whether engines on this platform can release their memory and restore it at the same addresses."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_sleep_mode_available() and current_platform.is_cumem_allocator_available())


def drain(engine: LLMEngine) -> list[RequestOutput]:
    """Completes the steps in flight without starting another, and returns their outputs.

    Without asynchronous scheduling there are none. A paused scheduler produces empty batches, and each step takes the oldest
    batch from the queue.
    """
    core = engine.engine_core.engine_core
    outputs: list[RequestOutput] = []
    if core.batch_queue:
        core.pause_scheduler("keep", clear_cache=False)
        while core.batch_queue:
            outputs += engine.step()
        core.resume_scheduler()
    return outputs
