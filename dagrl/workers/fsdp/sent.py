"""The weights of a sharded model as others get them: under the names of its checkpoint, in `policy.precision`.

Imported only where torch is.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from dagrl.refit.slices import WeightSlice
from dagrl.refit.sources import slices_of, tensors_of
from dagrl.workers.fsdp.lora import Adapters, plain_view


class SentWeights:
    """What a refit sends of `net`. `tensors` are its own shards, or copies: in another dtype, on the `device`, or merged.

    With `packs` the sender casts shards as it packs them, or a receiver that maps them as it copies, so they need no copies
    in `precision`.
    """

    def __init__(
        self, net: nn.Module, precision: str, device: torch.device, adapters: Adapters | None, *, packs: bool = False
    ) -> None:
        self.slices = sent_slices(net, precision)
        shards = tensors_of(plain_view(net), dtype=_dtype_of(net))
        self._adapters = {} if adapters is None else adapters.held
        kinds = {one.tensor: getattr(torch, one.dtype or precision) for one in self.slices}
        self._copies = {
            name: torch.empty_like(shard, dtype=kinds[name], device=device, memory_format=torch.contiguous_format)
            for name, shard in shards.items()
            if (shard.dtype != kinds[name] and not packs) or shard.device != device or name in self._adapters
        }
        fixed = packs or bool(self._copies)  # shards keep their memory, and looking them up takes time
        self.tensors: Mapping[str, Tensor] = {**shards, **self._copies} if fixed else shards
        plain = [name for name in self._copies if name not in self._adapters]
        self._plain = [self._copies[name] for name in plain], [shards[name] for name in plain]

    @torch.no_grad()
    def update(self) -> None:
        """Copies the current weights where `tensors` has copies."""
        for name, adapter in self._adapters.items():
            self._copies[name].copy_(adapter.merged(), non_blocking=True)
        if self._plain[0]:
            torch._foreach_copy_(*self._plain, non_blocking=True)


class SentAdapters:
    """What a refit of adapters alone sends: A, and B times its scale, whole on each rank, in `policy.precision`."""

    def __init__(self, adapters: Adapters, precision: str, device: torch.device) -> None:
        self.slices, self._adapters = adapters.sent_slices(), adapters
        dtype = getattr(torch, precision)
        sizes = {part.tensor: [stop for _, stop in part.box] for part in self.slices}
        self.tensors = {name: torch.empty(size, dtype=dtype, device=device) for name, size in sizes.items()}

    def update(self) -> None:
        """Copies the current adapters. A collective."""
        for name, value in self._adapters.sent().items():
            self.tensors[name].copy_(value, non_blocking=True)


def sent_slices(net: nn.Module, precision: str) -> list[WeightSlice]:
    """Returns the slices of a model's weights in `precision`, and of its buffers as they are."""
    trained, buffers = _dtype_of(net), dict(net.named_buffers())
    slices = slices_of(plain_view(net), dtype=trained)
    if trained == precision:
        return slices
    return [replace(part, dtype=trained) if part.tensor in buffers and not part.dtype else part for part in slices]


def _dtype_of(net: nn.Module) -> str:
    return str(next(net.parameters()).dtype).removeprefix("torch.")
