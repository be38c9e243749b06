"""Cases of train workers: a model in a layout of one backend; how tests call a group of them; the truth of plain torch."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch, Bucket
from dagrl.runtime.split import split_rows
from dagrl.runtime.worker import ReplayContext, replay_context
from dagrl.telemetry.metrics import merge_step_metrics
from tests.integration import megatron_reference as reference
from tests.integration.train_pool import Group, WorkerPool
from tests.integration.train_workers import TestedMegatronWorker, gradients_alone, single_worker

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 64}}
UNCLIPPED = {"clip_grad": 1e3}  # clipped gradients would not show that they are too large by a factor
FSDP_SIZES = {
    "dp": "data_parallel_size",
    "replicas": "data_parallel_replicas",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}


@dataclass(frozen=True, eq=False)
class Case:
    """A model in a layout. `section` has more keys of the backend's, `policy` more keys of `policy`.

    `sharded`: with Megatron's distributed optimizer, of which each worker has a part of the gradients. `slow`: others in CI
    have its parts.
    """

    model: str
    backend: Literal["megatron", "fsdp"]
    sizes: dict[str, int]
    section: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    sharded: bool = False
    slow: bool = False

    def __str__(self) -> str:
        sizes = "".join(f"{name}{size}" for name, size in self.sizes.items())
        section = [value if isinstance(value, str) else name for name, value in self.section.items()]
        words = (self.backend, self.model, sizes, *section, "sharded" * self.sharded, "packed" * self.packed)
        return "-".join(filter(None, words))

    def config(self, model: Path, **policy: Any) -> Config:
        """Returns the configuration of a run on a checkpoint, with further keys of `policy`."""
        policy = {**(PACKED if self.packed else {}), **self.policy, **policy}
        if self.backend == "megatron":
            return reference.make_config(model, sharded=self.sharded, megatron_cfg=self.section, **policy)
        sizes = {FSDP_SIZES[name]: size for name, size in self.sizes.items()}
        return reference.make_config(model, backend="fsdp", fsdp_cfg={**sizes, **self.section}, **policy)

    def group(self, pool: WorkerPool, role: str = "policy", **policy: Any) -> AbstractContextManager[Group]:
        """Starts workers on the pool's model."""
        config = self.config(pool.models[self.model], **policy)
        layout = ParallelLayout(**self.sizes) if self.backend == "megatron" else config.policy.train_layout
        return pool.group(layout, config, kind=f"{self.backend} {role}")

    @property
    def batch(self) -> Batch:
        return reference.make_batch(vocabulary_of(self.model))


def megatron(
    model: str,
    *,
    sequence_parallel: bool = False,
    recomputed: bool = False,
    overlap: bool = False,
    packed: bool = False,
    sharded: bool = False,
    slow: bool = False,
    policy: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    **sizes: int,
) -> Case:
    """Returns a case of Megatron. `sizes`: those of `ParallelLayout`."""
    keys: dict[str, Any] = {"sequence_parallel": True} if sequence_parallel else {}
    keys |= {"activation_checkpointing": True} if recomputed else {}
    keys |= {"distributed_data_parallel_config": {"overlap_grad_reduce": True}} if overlap else {}
    return Case(model, "megatron", sizes, {**keys, **(section or {})}, policy or {}, packed, sharded, slow)


def fsdp(
    model: str,
    *,
    section: dict[str, Any] | None = None,
    packed: bool = False,
    slow: bool = False,
    policy: dict[str, Any] | None = None,
    **sizes: int,
) -> Case:
    """Returns a case of FSDP. `sizes`: dp, replicas, tp, cp and ep."""
    return Case(model, "fsdp", sizes, section or {}, policy or {}, packed, slow=slow)


def each(cases: Iterable[Case], name: str = "case") -> pytest.MarkDecorator:
    """Parametrizes a test with cases."""
    return pytest.mark.parametrize(
        name, [pytest.param(case, marks=[pytest.mark.slow] * case.slow, id=str(case)) for case in cases]
    )


def vocabulary_of(model: str) -> int:
    return int(reference.MODELS[model].get("vocab_size", reference.VOCABULARY))


def shard_batches(batch: Batch, layout: ParallelLayout) -> list[Batch]:
    """Returns the rows of each data-parallel shard, in a larger bucket: with two shards there are padding rows."""
    shards = split_rows(batch["lengths"], layout.dp)
    bucket = Bucket(len(shards[0]) + layout.dp - 1, reference.WIDTH)
    return [reference.padded(batch.select(rows), bucket) for rows in shards]


def call_shards(group: Group, method: str, batch: Batch, *args: Any, **options: Any) -> list[Any]:
    """Calls a method on all workers with the rows of their shard."""
    shards, ranks = shard_batches(batch, group.layout), range(group.layout.world_size)
    per_rank = [(shards[group.layout.coordinates(rank).dp], *args) for rank in ranks]
    return group.call(method, per_rank=per_rank, **options)


def train(group: Group, batch: Batch, loss: str = "likelihood", **options: Any) -> dict[str, float]:
    """Runs a step on all workers and merges the metrics like the runtime."""
    metrics = merge_step_metrics(call_shards(group, "train_step", batch, loss, **options)).flat()
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}  # times differ


def columns(group: Group, batch: Batch, method: str, names: tuple[str, ...], *args: Any) -> dict[str, Any]:
    """Returns columns of the whole batch, in order, from the one reporting worker of each shard."""
    parts, layout = call_shards(group, method, batch, *args), group.layout
    found: dict[str, Any] = {}
    for shard, positions in enumerate(split_rows(batch["lengths"], layout.dp)):
        (part,) = [part for rank, part in enumerate(parts) if layout.coordinates(rank).dp == shard and part is not None]
        for name in names:
            array = found.setdefault(name, np.zeros((batch.rows, *part[name].shape[1:]), part[name].dtype))
            array[positions] = part[name][: len(positions)]
    return found


def logprobs(group: Group, batch: Batch, *model: str) -> dict[str, Any]:
    """Returns the log-probabilities and the entropy of the whole batch."""
    return columns(group, batch, "logprobs", ("logprobs", "entropy"), *model)


def gradients_of(group: Group, mixtral: bool = False) -> dict[str, Any]:
    """Returns the whole gradients after the last step, by the names of checkpoints."""
    return reference.checkpoint_names(reference.assemble(group.call("gradients")), mixtral)


def run_case(pool: WorkerPool, case: Case, **policy: Any) -> reference.Run:
    """Runs a case on its batch, with further keys of `policy`."""
    with case.group(pool, optimizer=UNCLIPPED, **policy) as group:
        first = logprobs(group, case.batch)
        train(group, case.batch, warmup="whole")  # gradients, but no update
        gradients = {} if case.sharded else gradients_of(group, case.model == "mixtral")
        steps = [train(group, case.batch) for _ in range(reference.STEPS)]
    losses, norms = [step["loss"] for step in steps], [step["grad_norm"] for step in steps]
    return reference.Run(first["logprobs"], first["entropy"], losses, norms, gradients)


@cache
def plain_torch(directory: Path) -> reference.Run:
    """Returns what transformers and plain torch give in one process."""
    batch, config = (
        reference.make_batch(vocabulary_of(directory.name)),
        reference.make_config(directory, optimizer=UNCLIPPED),
    )
    return reference.train_reference(directory, batch, config, reference.sft_reference)


def group_batch() -> Batch:
    """Three prompts with completions of different lengths, one of them without a token in the loss."""
    prompts, lengths = np.array([12] * 3 + [9] * 3 + [15] * 2), np.array([22, 13, 17, 12, 21, 9, 20, 16])
    places, batch = np.arange(reference.WIDTH), reference.make_batch(grpo=True)
    tokens = np.random.default_rng(5).integers(0, reference.VOCABULARY, batch["tokens"].shape)
    for row in (1, 2, 4, 5, 7):
        tokens[row, : prompts[row]] = tokens[row - 1, : prompts[row]]
    inside = places < lengths[:, None]
    mask = (inside & (places >= prompts[:, None])).astype(np.float32)
    counts = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float((mask.sum(1) > 0).sum())}
    return batch.with_fields(tokens=tokens * inside, lengths=lengths, loss_mask=mask).with_scalars(**counts)


def shared_prefix(shared: bool) -> dict[str, Any]:
    """Returns keys of `policy` by which a prompt of several completions is in a row once, or as often as it is there."""
    packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96, "shared_prefix": shared}
    return {"sequence_packing": packing, "optimizer": UNCLIPPED}


def run_group(group: Group, batch: Batch) -> tuple[reference.Run, float]:
    """Returns log-probabilities, loss and gradients, and the share of saved tokens."""
    rows = logprobs(group, batch)
    step = train(group, batch, warmup="whole")  # gradients, but no update
    run = reference.Run(rows["logprobs"], rows["entropy"], [step["loss"]], [step["grad_norm"]], gradients_of(group))
    return run, step["shared_prefix_share"]


@cache
def plain_group(directory: Path) -> reference.Run:
    """Returns what transformers gives for `group_batch`, one sequence at a time, without values past the lengths."""
    batch, config = group_batch(), reference.make_config(directory, optimizer=UNCLIPPED)
    return reference.train_reference(directory, batch, config, reference.sft_reference, steps=1)


WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}},
    "recomputed": {"megatron_cfg": {"activation_checkpointing": True}},
}


def run_alone(model: Path, steps: int = reference.STEPS, **policy: Any) -> reference.Run:
    """Runs log-probabilities, gradients and then steps of one Megatron worker in this process."""
    batch = reference.make_batch()
    with single_worker(reference.make_config(model, optimizer=UNCLIPPED, **policy), TestedMegatronWorker) as worker:
        rows = worker.logprobs(batch)
        assert rows is not None
        with gradients_alone():
            worker.train_step(batch, "likelihood")
        gradients, taken = reference.assemble([worker.gradients()]), []
        for step in range(steps):
            with replay_context(ReplayContext("test", step, False)):
                taken.append(worker.train_step(batch, "likelihood").flat())
    losses, norms = ([step[name] for step in taken] for name in ("loss", "grad_norm"))
    return reference.Run(rows["logprobs"], rows["entropy"], losses, norms, gradients)


def run_group_alone(model: Path, shared: bool, graphs: bool) -> tuple[reference.Run, float]:
    """Runs `group_batch` in bfloat16 on one Megatron worker in this process; with `graphs`, replayed ones."""
    batch, keys = group_batch(), {"megatron_cfg": {"cuda_graphs": graphs}, **shared_prefix(shared)}
    with single_worker(reference.make_config(model, precision="bfloat16", **keys), TestedMegatronWorker) as worker:
        for _ in range(3 if graphs else 1):  # the third is a replay
            rows = worker.logprobs(batch)
            metrics = worker.train_step(batch.with_scalars(lr=0.0), "likelihood").flat()
        gradients = reference.assemble([worker.gradients()])
    assert rows is not None
    run = reference.Run(rows["logprobs"], rows["entropy"], [metrics["loss"]], [metrics["grad_norm"]], gradients)
    return run, metrics["shared_prefix_share"]
