"""Parts of train workers: storages in host memory, columns kept by row id, learning rates, and workers of one's own."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dagrl.config import Config
from dagrl.errors import RunError
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import WorkerContext
from dagrl.telemetry.metrics import StepMetrics
from dagrl.workers.train import checkpoint
from dagrl.workers.train.checkpoint import StagingBuffers
from dagrl.workers.train.kept_logprobs import KeptLogprobs
from dagrl.workers.train.microbatches import upload
from dagrl.workers.train.module_worker import ModuleWorker
from dagrl.workers.train.offload import StateCopy, bucket_spans
from dagrl.workers.train.optimizer import OptimizerSteps

SHAPES = [((300, 7), torch.float32), ((5,), torch.bfloat16), ((2, 3, 4), torch.float32), ((1,), torch.int64)] * 40


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 20))
def test_spans_cover_every_storage_and_fill_buckets_in_order(sizes: list[int], bucket_bytes: int) -> None:
    spans = bucket_spans(sizes, bucket_bytes)
    for storage, size in enumerate(sizes):
        parts = [span for span in spans if span.storage == storage]
        assert [byte for span in parts for byte in range(span.start, span.stop)] == list(range(size))
    ends = [span.offset + span.stop - span.start for span in spans]
    starts = [span.bucket * bucket_bytes for span in spans]
    places = [start + byte for start, span, end in zip(starts, spans, ends, strict=True) for byte in range(span.offset, end)]
    assert places == list(range(sum(sizes))) and max(ends, default=0) <= bucket_bytes


def test_a_state_that_comes_back_is_where_its_views_look() -> None:
    whole = torch.ones(8)
    state, view = StateCopy([whole[:3], whole[3:]], None), whole[3:]
    for value in (1.0, 2.0):
        state.offload()
        assert whole.untyped_storage().nbytes() == 0
        state.reload()
        assert view.tolist() == [value] * 5
        whole.fill_(2.0)


def test_copies_share_buckets_but_are_saved_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "BUCKET_BYTES", 1 << 12)
    staging = StagingBuffers()
    values = [torch.randn(shape).to(dtype) for shape, dtype in SHAPES]
    copies = [staging.room_for(value).copy_(value) for value in values]
    for copy, value in zip(copies, values, strict=True):
        assert torch.equal(copy, value) and copy.dtype == value.dtype
        assert copy.untyped_storage().nbytes() == value.nbytes  # torch.save writes whole storages
    assert sum(bucket.nbytes for bucket in staging._buckets) < sum(value.nbytes for value in values) * 2
    assert all(bucket.nbytes.bit_count() == 1 for bucket in staging._buckets)  # powers of two, as pinned memory is rounded
    assert len(staging._buckets) == 40  # each large copy needs its own bucket; the small ones fit after the first
    value = torch.arange(6.0)
    copy = staging.copy(value)
    value.zero_()
    assert copy.tolist() == [0, 1, 2, 3, 4, 5], "copies of host tensors are independent"


def test_arrays_arrive_with_their_types_and_shapes() -> None:
    generator = np.random.default_rng(0)
    arrays = [
        generator.integers(0, 9, (3, 5)),
        generator.normal(size=7).astype(np.float32),
        generator.integers(0, 9, 1).astype(np.int32),
        np.zeros((2, 0), np.float32),
        generator.normal(size=(2, 3)),
        generator.integers(0, 2, 3).astype(np.bool_),
    ]
    tensors = upload(arrays, torch.device("cpu"))
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
    assert upload([], torch.device("cpu")) == []


LENGTHS = (3, 5, 1, 4)


def batch_of(ids: list[int], width: int, step: int = 1) -> Batch:
    """Rows with the length of their id; the last row is padding."""
    lengths = np.array([LENGTHS[row_id] for row_id in ids] + [0])
    fields = {"row_ids": np.array([*ids, 0]), "lengths": lengths, "loss_mask": mask_of(ids, width)}
    return Batch(fields, {"step": step})


def mask_of(ids: list[int], width: int) -> npt.NDArray[np.float32]:
    """Returns the mask of every token of a row but the first."""
    lengths = np.array([LENGTHS[row_id] for row_id in ids] + [0])
    tokens = np.arange(width)[None, :]
    return ((tokens < lengths[:, None]) & (tokens > 0)).astype(np.float32)


def values_of(ids: list[int], width: int) -> npt.NDArray[np.float32]:
    """Returns 10 i + t + 1 for token t of row i."""
    return (10 * np.array([*ids, 9])[:, None] + np.arange(width)[None, :] + 1).astype(np.float32)


@given(order=st.permutations(range(4)), split=st.integers(0, 4), width=st.integers(5, 8), other=st.integers(5, 8))
def test_rows_are_found_by_their_id(order: list[int], split: int, width: int, other: int) -> None:
    kept = KeptLogprobs()
    for ids in (order[:split], order[split:]):
        kept.keep(batch_of(ids, width), prev_logprobs=values_of(ids, width), entropy=-values_of(ids, width))
    joined = kept.join(batch_of([0, 1, 2, 3], other), ["prev_logprobs"])
    mask = mask_of([0, 1, 2, 3], other)
    np.testing.assert_array_equal(joined["prev_logprobs"], values_of([0, 1, 2, 3], other) * mask)
    np.testing.assert_array_equal(joined["entropy"] * mask, -values_of([0, 1, 2, 3], other) * mask)
    unknown = kept.join(batch_of([0, 1, 2, 3], other), ["reference_logprobs"], required=False)
    assert not unknown["reference_logprobs"].any(), "no phase computed them"
    assert "row_ids" not in joined.fields


def test_rows_that_are_not_held_are_an_error() -> None:
    """As another shard computed them, or they are of another step, whose rows are forgotten."""
    kept = KeptLogprobs()
    kept.keep(batch_of([0, 2], 5), prev_logprobs=values_of([0, 2], 5))
    with pytest.raises(RunError, match="on 1 rows whose prev_logprobs this worker does not hold, the first with row_id 1"):
        kept.join(batch_of([0, 1], 5), ["prev_logprobs"])
    kept.keep(batch_of([0, 1], 5), prev_logprobs=values_of([0, 1], 5))
    with pytest.raises(RunError, match=r"step 2 trains on 2 rows whose prev_logprobs .* the first with row_id 0"):
        kept.join(batch_of([0, 1], 5, step=2), ["prev_logprobs"])
    with pytest.raises(RunError, match="step 1 trains"):
        kept.join(batch_of([0, 1], 5), ["prev_logprobs"])


def test_a_batch_without_row_ids_is_left_alone() -> None:
    batch = Batch({"lengths": np.array([2]), "loss_mask": np.ones((1, 2), np.float32)})
    assert KeptLogprobs().join(batch, ["prev_logprobs"]) is batch


WARMUP, DECAY, START, PEAK, END = 4, 20, 1e-5, 1e-3, 1e-4


def cosine(part: float) -> float:
    return END + (PEAK - END) * (1 + math.cos(math.pi * part)) / 2


def linear(part: float) -> float:
    return END + (PEAK - END) * (1 - part)


def schedule_of(settings: dict[str, Any]) -> OptimizerSteps:
    return OptimizerSteps(Config.model_validate({"name": "x", "data": {}, **settings}))


@pytest.mark.parametrize(("style", "after"), [("constant", lambda part: PEAK), ("linear", linear), ("cosine", cosine)])
def test_learning_rates_are_those_of_the_formula(style: str, after: Any) -> None:
    scheduler = {"lr_decay_style": style, "lr_warmup_iters": WARMUP, "lr_warmup_init": START, "lr_decay_iters": DECAY}
    policy = {"optimizer": {"lr": PEAK, "min_lr": END}, "scheduler": scheduler}
    made = schedule_of({"algorithm": "sft", "policy": policy})
    for step in range(DECAY + 5):
        if step <= WARMUP:
            expected = START + (PEAK - START) * step / WARMUP
        else:
            expected = after(min(1.0, (step - WARMUP) / (DECAY - WARMUP)))
        assert made.rate == pytest.approx(expected, rel=1e-9), step
        made.taken += 1


@pytest.mark.parametrize(("algorithm", "steps"), [("grpo", 2 * 10), ("sft", 7)])
def test_by_default_the_schedule_ends_after_the_last_optimizer_step(algorithm: str, steps: int) -> None:
    """Ten GRPO steps of two minibatches decay over twenty optimizer steps; the twenty-first has the final rate."""
    grpo = {"max_num_steps": 10, "num_prompts_per_step": 8, "num_generations_per_prompt": 16}
    rates = {"optimizer": {"lr": PEAK, "min_lr": END}, "scheduler": {"lr_decay_style": "linear"}}
    policy = {**rates, "train_global_batch_size": 64}
    made = schedule_of({"algorithm": algorithm, "policy": policy, "grpo": grpo, "sft": {"max_num_steps": 7}})
    for step in range(steps + 1):
        assert made.rate == pytest.approx(linear(step / steps), rel=1e-9)
        made.taken += 1


class Experts(ModuleWorker):
    """A model of two experts, of which this rank's sequences use the first alone; a third is frozen."""

    def _shares(self, batch: Batch, loss: str) -> Iterator[tuple[Tensor, StepMetrics]]:
        yield self.model[0](torch.ones(1, 2)).sum(), StepMetrics()  # type: ignore[index]


def test_ranks_sum_the_same_gradients_whatever_experts_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one rank would wait for a sum that another does not take part in."""
    summed: list[Tensor] = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda gradient: summed.append(gradient.clone()))
    config = Config.model_validate({"name": "x", "data": {}, "algorithm": "sft", "policy": {}})
    worker = Experts(WorkerContext("train", 0, ParallelLayout()), config)
    worker.model = torch.nn.Sequential(*(torch.nn.Linear(2, 1, bias=False) for _ in range(3)))
    worker.model[2].requires_grad_(False)
    worker.optimizer = torch.optim.SGD(worker.model.parameters())
    worker.train_step(Batch({"lengths": np.ones(1, np.int64)}, {"lr": 0.1}), "likelihood")
    assert [gradient.tolist() for gradient in summed] == [[[1.0, 1.0]], [[0.0, 0.0]]]
