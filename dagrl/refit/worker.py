"""What a refit calls on the workers of both groups, in addition to the methods that its phase names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dagrl.channels.spec import ChannelSpec
from dagrl.refit.slices import WeightSlice
from dagrl.refit.transfers import RankPlan


class RefitWorker(Protocol):
    """A worker that sends or receives weights.

    Optional: `weight_tensors() -> Mapping[str, Tensor]` returns these tensors by name, to tell which GPU holds them;
    `weight_config() -> Mapping[str, Json]` returns the keys of the model's configuration that decide what it computes. A
    refit is refused between workers that differ in one of these keys.
    """

    def weight_slices(self) -> Sequence[WeightSlice]:
        """Returns the parts of the model that the worker holds, and the tensors that they are in."""
        ...

    def prepare_refit(self, plan: RankPlan, channel: ChannelSpec, /) -> None:
        """Opens the channel. Called on all workers at once, and again for a new plan."""
        ...
