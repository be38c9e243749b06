"""What a refit of a recording writes: the model's tensors, views of them, and the inputs of what is computed afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from dagrl.refit.recording import Recording


class Recorded:
    """`tensors` by the local names in the recording's slices. `held` are those of the model, by name.

    After each refit call `compute`.
    """

    def __init__(self, found: Recording, held: Mapping[str, torch.Tensor]) -> None:
        device = next(iter(held.values())).device
        self._found, self._held = found, held
        self._inputs = {
            name: where.empty(dtype, device) for one in found.computations for name, (where, dtype) in one.inputs.items()
        }
        self.tensors = {**held, **self._inputs}
        self.tensors |= {name: arranged.of(self.tensors[arranged.tensor]) for name, arranged in found.arranged.items()}

    def compute(self) -> None:
        """Writes what the loader computes from the weights that a refit has written."""
        for one in self._found.computations:
            target = self._held[one.parameter].as_strided(one.target.shape, one.target.strides, one.target.offset)
            target.copy_(one.compute(self._inputs))


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns all parameters and buffers of a model, by each of their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def check_complete(model: str, found: Recording) -> None:
    """Raises ConfigError unless a refit can write all of the model."""
    for name, reason in found.refused.items():
        raise ConfigError(
            f"the engine's loader of {model} puts {name!r} where a refit cannot: {reason}. Set refit.unmapped to load, and "
            "the loader itself loads it after each refit"
        )
    if found.unwritten and not found.unmapped:  # the engine has checked that the checkpoint fills the model
        names = [f"{name!r} ({count} elements)" for name, count in sorted(found.unwritten.items())]
        raise ConfigError(
            f"the checkpoint fills the engine's {model} in part: {', '.join(names[:4])} of {len(names)} parameters would "
            "stay as they are. Use a complete plain checkpoint, or a kernel that does not pad"
        )
