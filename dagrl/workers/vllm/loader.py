"""vLLM's checkpoint loader, extended to keep the parameters as they are before post-processing.

After loading, vLLM converts each layer's weights for its kernels: the CPU backend packs linear weights into oneDNN's format
and drops the originals, and some MoE kernels shuffle them. A refit writes the originals, in vLLM's documented
fused layout (see `destinations.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from dagrl.workers.vllm.quantization import quantize_checkpoint

if TYPE_CHECKING:
    import torch

    from dagrl.refit.recording import Recording

LOAD_FORMAT = "dagrl"
_ATTRIBUTE = "dagrl_loaded"

Checkpoint: TypeAlias = "list[tuple[str, tuple[int, ...], torch.dtype]]"
"""Name, shape and dtype of each parameter of a checkpoint."""


@dataclass(frozen=True)
class LoadedParameter:
    """A parameter as loaded from the checkpoint, and a sample of its content that reveals later changes."""

    tensor: torch.Tensor
    sample: torch.Tensor

    def unchanged(self) -> bool:
        """Returns whether the sampled content is unchanged since loading."""
        return _sample(self.tensor).equal(self.sample)


@dataclass(frozen=True)
class LoadedModel:
    """Parameters and buffers as loaded, by vLLM's names, and where the loader has put the checkpoint."""

    tensors: dict[str, LoadedParameter]
    recording: Recording


def register_loader(quantizes: bool = False) -> None:
    """Registers the load format for the next engine (`vllm.model_executor.model_loader.register_model_loader`).

    `quantizes`: a plain checkpoint is read into an FP8 model. What the model holds in FP8 is quantized while it is read.
    """
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from dagrl.refit.recording import named_tensors, record

    class EngineLoader(DefaultModelLoader):  # type: ignore[misc]
        def __init__(self, load_config: LoadConfig) -> None:
            load_config.load_format = "auto"
            load_config.use_tqdm_on_load = False
            super().__init__(load_config)
            self.checkpoint: Checkpoint = []

        def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
            weights = super().get_all_weights(model_config, model)
            if quantizes:
                device = next(model.parameters()).device
                plain = [(name, tuple(weight.shape), weight.dtype) for name, weight in weights]
                names = record(model, plain, model_config.dtype).quantized
                weights = quantize_checkpoint(super().get_all_weights(model_config, model), names, device)
            for name, weight in weights:
                self.checkpoint.append((name, tuple(weight.shape), weight.dtype))
                yield name, weight

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            recording = record(model, self.checkpoint, model_config.dtype)
            tensors = {name: LoadedParameter(tensor, _sample(tensor)) for name, tensor in named_tensors(model).items()}
            object.__setattr__(model, _ATTRIBUTE, LoadedModel(tensors, recording))

    register_model_loader(LOAD_FORMAT)(EngineLoader)


def take_loaded_model(model: torch.nn.Module) -> LoadedModel:
    """Returns the model as loaded, and removes it from the module."""
    loaded: LoadedModel = model.__dict__.pop(_ATTRIBUTE)
    return loaded


def _sample(tensor: torch.Tensor, elements: int = 1024) -> torch.Tensor:
    import torch

    flat = tensor.detach().reshape(-1)
    raw = flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat  # few kernels know FP8
    return raw[:: max(1, raw.numel() // elements)].clone()
