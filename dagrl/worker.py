"""What a worker class is given, and what it may ask while one of its methods runs in a replay.

A worker is any class whose constructor takes `(context, config)`. Its methods are what phases name, those that are no
`async def`: a node is over when its method returns. These have a meaning of their own; all are optional:

- `requires: tuple[str, ...]` (of the class): top-level packages that it imports later; without them no run starts;
- `check(config, hf_config)` (static): raises a UserError, before any actor starts, for a model that the class cannot hold;
- `describe(config, hf_config, layout, rank) -> list[WeightSlice]` (static): the weights that a rank will hold, for a refit
  plan without a run;
- `weight_config() -> Mapping`: the keys of the model's configuration that decide what it computes; train and generation
  workers that differ in one are refused before a refit;
- `environment(config) -> dict[str, str]` (static): environment variables the process needs before anything is imported;
- `setup(address)`: called once on all workers of a group at the same time; `address` is `host:port` of rank 0, free to
  use for a rendezvous;
- `abort()`: called, from another thread, when this worker failed or a peer did: break collectives so that peers are freed;
- `shutdown()`: called once, before the process ends.

A refit (`dagrl.refit.connect`) asks of the workers of both groups, besides the methods that its phase names:

- `weight_slices() -> Sequence[WeightSlice]`: what the worker holds of the model, and in which of its tensors;
- `weight_tensors() -> Mapping[str, Tensor]` (optional): these tensors by name, which tell on which GPU it holds them;
- `prepare_refit(plan: RankPlan, channel: ChannelSpec)`: open the channel, on all workers at once; may be called again.

The loops of `dagrl.loops` call these outside of phases. Of train workers: `reset_optimizer()`, `snapshot_reference()` where
there is a KL penalty, `save_checkpoint(directory, state, background=False)`, `checkpoint_written() -> bool` and
`finish_checkpoint()` where checkpoints are saved beside training, `load_checkpoint(directory)`, `export_hf(directory)`, and
on shared GPUs `offload(parts)` and `reload(parts)`. Of generation workers: `abort_requests(request_ids)`,
`unfinished_requests() -> list[FinishedRequest]`, and on shared GPUs `sleep(level)` and `wake_up(tags)`. The workers that we
ship say what each is to do (`workers.megatron`, `workers.vllm`).
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from dagrl.errors import RunError
from dagrl.layout import Coordinates, ParallelLayout


@dataclass(frozen=True)
class WorkerContext:
    """Who a worker is: its role, its rank in the layout of its group, and the deadline of a collective in seconds."""

    role: str
    rank: int
    layout: ParallelLayout
    seed: int = 0
    collective_timeout_s: float = 60.0

    @property
    def coordinates(self) -> Coordinates:
        """Where the worker stands in its group's layout."""
        return self.layout.coordinates(self.rank)


class ReplayContext(NamedTuple):
    """The replay that is running: `warmup` replays must leave weights, optimizer, RNG and counters as they were."""

    phase: str
    replay: int
    warmup: bool


_current: ContextVar[ReplayContext | None] = ContextVar("dagrl_replay", default=None)


class replay_context:  # a class, not a generator: it is on the way of every replay, and this takes half the time
    """Make `replay` the current one for the methods called inside the block."""

    def __init__(self, replay: ReplayContext) -> None:
        self._replay = replay

    def __enter__(self) -> None:
        self._token = _current.set(self._replay)

    def __exit__(self, *exception: object) -> None:
        _current.reset(self._token)


def current_replay() -> ReplayContext:
    """The replay this thread is running; raises RunError outside of one."""
    replay = _current.get()
    if replay is None:
        raise RunError("no replay is running in this thread; current_replay() is for methods called by a phase")
    return replay


def in_warmup() -> bool:
    """Whether this thread runs a warm-up replay (False outside of a replay)."""
    replay = _current.get()
    return replay is not None and replay.warmup
