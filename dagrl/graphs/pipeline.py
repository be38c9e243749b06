"""A pipeline that the graph schedules, for workers without a scheduler of their own.

Each stage of a shard runs its microbatches in 1F1B order: warm-up forwards, then one forward and one backward in turn, then
the remaining backwards (the non-interleaved PipeDream-flush schedule; Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", section 2.2.1). Stage `s` of `S` never holds the activations of more than
`S - s` microbatches, and idles `(S - 1) / microbatches` of its compute time.

    step = pipeline_phase(microbatches=8, transport="nccl")
    scheduler.add(step, buckets=[Bucket(16, 512)], result_bytes=...)   # room for one microbatch's activations

Workers must fit `PipelineWorker`; `examples/pipeline.py` has one for plain torch modules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

from dagrl.errors import DataError, GraphError
from dagrl.graphs.phases import ROWS
from dagrl.runtime.graph import SHARED_MEMORY
from dagrl.runtime.phase import Input, Phase, Shard, Value, join, phase
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.metrics import StepMetrics

Work = tuple[Literal["forward", "backward"], int]  # one step of a stage's schedule: the direction and the microbatch


class PipelineWorker(Protocol):
    """A worker of a pipeline stage. A class with these methods need not derive from it.

    The calls of one replay come in this order: `start_step`, `forward` and `backward` in 1F1B order, `finish_gradients`,
    `optimizer_step`. Activations and gradients are NumPy arrays or detached tensors, or lists or dictionaries of these. They
    are read-only, and arrays are views that end with the replay. Over `nccl` they are contiguous tensors on the worker's
    GPU. Warm-up replays (`dagrl.in_warmup`) leave weights and optimizer unchanged.
    """

    def start_step(self, batch: Batch, microbatches: int) -> None:
        """Stores the stage's part of the batch (`split_microbatches` copies it). Drops what a failed step left."""

    def forward(self, activations: object, microbatch: int) -> object:
        """Runs one microbatch, keeps what its backward needs, and returns the activations for the next stage.

        The first stage gets None and takes its rows from the batch. The last stage keeps the loss and returns None.
        """

    def backward(self, gradients: object, microbatch: int) -> object:
        """Adds one microbatch's gradients to the stage's, and returns the gradients of the activations that it got.

        `gradients` are those of the activations that it returned: None on the last stage, which starts from its loss. The
        first stage returns None.
        """

    def finish_gradients(self, over: list[None]) -> StepMetrics:
        """Sums the gradients of this stage, after every backward of every stage; `over` carries no data.

        Sums the gradients over data-parallel replicas, if there are any. Returns what `optimizer_step` needs from all
        stages, such as the squared norm of this stage's gradients in `sums`.
        """

    def optimizer_step(self, total: StepMetrics) -> StepMetrics:
        """Clips and steps, given the stages' merged `finish_gradients`. Returns this stage's metrics (its part of the loss).

        Not called on any stage if one of them failed, so all stages keep the weights of the same step.
        """

    def merge_metrics(self, parts: list[StepMetrics]) -> StepMetrics:
        """Merges the metrics of stages (`dagrl.telemetry.metrics.merge_step_metrics`)."""


def pipeline_phase(microbatches: int = 8, transport: str = SHARED_MEMORY) -> Phase:
    """Returns the phase of one optimizer step over the pipeline stages of the `train` group.

    `transport` carries activations and gradients between stages: `shm`, or `nccl` between GPUs. The rows of each bucket must
    be a multiple of `microbatches`. Raises GraphError for fewer than one microbatch.
    """
    if microbatches < 1:
        raise GraphError(f"a pipeline of {microbatches} microbatches; expected at least one")

    @phase(inputs=ROWS)
    def pipeline_step(train: Shard, batch: Input) -> Value:
        stages = train.stages()
        started = [stage.map("start_step", batch, microbatches=microbatches) for stage in stages]
        backwards = _forwards_and_backwards(stages, started[0], microbatches, transport)
        over = join(*backwards, *started)  # a failure anywhere reaches it, so no stage steps without the others
        parts = train.map("finish_gradients", over)
        total = train.reduce("merge_metrics", parts)
        return train.reduce("merge_metrics", train.map("optimizer_step", total))

    return pipeline_step


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Work]:
    """Returns the 1F1B order of one stage's work."""
    ahead = min(stages - stage - 1, microbatches)  # forwards of the warm-up
    order: list[Work] = [("forward", microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches - ahead):
        order += [("forward", ahead + microbatch), ("backward", microbatch)]
    return order + [("backward", microbatch) for microbatch in range(microbatches - ahead, microbatches)]


def split_microbatches(batch: Batch, microbatches: int) -> list[Batch]:
    """Returns copies of equally many rows each, in order. Raises DataError if the rows do not divide."""
    size, left = divmod(batch.rows, microbatches)
    if left or not size:
        raise DataError(
            f"a batch of {batch.rows} rows cannot be split into {microbatches} equal microbatches; "
            "make the sequences of every bucket a multiple of the microbatches"
        )
    return [batch.select(range(start, start + size)) for start in range(0, batch.rows, size)]


def _forwards_and_backwards(stages: Sequence[Shard], started: Value, microbatches: int, transport: str) -> list[Value]:
    """Makes the nodes of all stages. Returns the first stage's backwards, which come last.

    Both executors run a worker's nodes in the order in which they are made, so each stage's are made in 1F1B order. A node
    is made as soon as the node that it reads exists.
    """
    values: dict[tuple[str, int, int], Value] = {("forward", -1, microbatch): started for microbatch in range(microbatches)}
    waiting = [deque(one_forward_one_backward(stage, len(stages), microbatches)) for stage in range(len(stages))]
    while any(waiting):
        for number, stage in enumerate(stages):
            while waiting[number] and (source := _source(number, len(stages), *waiting[number][0])) in values:
                direction, microbatch = waiting[number].popleft()
                value = stage.map(direction, values[source], microbatch=microbatch)
                if number != (len(stages) - 1 if direction == "forward" else 0):  # another stage reads it
                    value.via(transport)
                values[direction, number, microbatch] = value
    return [values["backward", 0, microbatch] for microbatch in range(microbatches)]


def _source(stage: int, stages: int, direction: str, microbatch: int) -> tuple[str, int, int]:
    """Returns the key of a step's input: the stage before, the stage after, or the last stage's own forward."""
    if direction == "forward":
        return "forward", stage - 1, microbatch
    return ("backward", stage + 1, microbatch) if stage + 1 < stages else ("forward", stage, microbatch)
