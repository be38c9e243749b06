"""`TrainWorker` on one rank of FSDP: steps, log-probabilities, reference and files against plain torch."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from dagrl.config import Config
from dagrl.errors import ConfigError, RunError
from dagrl.examples.top_k_distill import NAMES, K
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import ReplayContext, WorkerContext, replay_context
from dagrl.telemetry.metrics import StepMetrics
from dagrl.workers.families.hf_config import SCORE
from dagrl.workers.fsdp import FsdpValueWorker, FsdpWorker
from dagrl.workers.train import checkpoint, losses
from dagrl.workers.train.checkpoint import StagingBuffers
from dagrl.workers.train.kept_logprobs import KeptLogprobs
from dagrl.workers.train.microbatches import upload
from dagrl.workers.train.module_worker import ModuleWorker
from dagrl.workers.train.offload import StateCopy, bucket_spans
from dagrl.workers.train.optimizer import OptimizerSteps
from tests.integration import megatron_reference as reference

WAYS = {"rows": {}, "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 64}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.make_model("qwen3", tmp_path_factory.mktemp("models"))


Make = Callable[..., Any]


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    """Starts a worker and ends the one before, as a process has one default group."""
    running: list[FsdpWorker] = []

    def start(kind: type[FsdpWorker] = FsdpWorker, **policy: Any) -> FsdpWorker:
        if running:
            running.pop().shutdown()
        config = reference.make_config(model, backend="fsdp", **policy)
        running.append(kind(WorkerContext("train", 0, ParallelLayout()), config))
        running[0].prepare()
        running[0].setup(f"127.0.0.1:{reserve_port()}")
        return running[0]

    yield start
    running[0].shutdown()


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_plain_torch(way: str, make: Make, model: Path) -> None:
    batch, worker = reference.make_batch(), make(**WAYS[way])
    expected = reference.train_reference(model, batch, worker.config, reference.sft_reference)
    found = worker.logprobs(batch)
    assert found is not None
    np.testing.assert_allclose(found["logprobs"], expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(found["entropy"], expected.entropy, atol=1e-5)
    answers = worker.answer_sums(batch)
    assert answers is not None
    np.testing.assert_allclose(answers["sums"], (expected.logprobs * batch["loss_mask"]).sum(1), atol=1e-4)
    assert worker.evaluate(batch, "likelihood").sums["loss"] == pytest.approx(expected.losses[0], abs=1e-5)
    full = batch.with_fields(lengths=np.full(batch.rows, batch.tokens), loss_mask=np.ones_like(batch["loss_mask"]))
    calls = patch.object(losses, "scored_logprobs", wraps=losses.scored_logprobs)
    with replay_context(ReplayContext("train_step", 0, True)), calls as scored:
        worker.train_step(full, "likelihood")  # changes nothing
    assert max(len(call.args[2]) for call in scored.call_args_list) <= batch.rows, "one token a row on a CPU"
    steps = [worker.train_step(batch, "likelihood").flat() for _ in range(reference.STEPS)]
    np.testing.assert_allclose([step["loss"] for step in steps], expected.losses, atol=1e-5)
    np.testing.assert_allclose([step["grad_norm"] for step in steps], expected.norms, rtol=1e-4)
    assert steps[0]["perf/train_tflops_per_gpu"] > 0


def test_a_step_reads_the_columns_that_the_worker_kept(make: Make, model: Path) -> None:
    """Without a change since, the ratio to the kept log-probabilities is 1: the loss is the mean of the advantages."""
    batch, worker = reference.make_batch(grpo=True), make(generation={"temperature": 0.7})
    rows = Batch({name: batch[name] for name in ("tokens", "lengths")}, {"step": 1.0})
    ids = np.arange(batch.rows) + 40
    with pytest.raises(RunError, match="no reference policy"):
        worker.keep_logprobs(rows.with_fields(row_ids=ids), "reference")
    worker.snapshot_reference()
    for name in ("policy", "reference"):
        worker.keep_logprobs(rows.with_fields(row_ids=ids), name)  # type: ignore[arg-type]
    kept = worker.kept_logprobs()
    assert set(kept) == {"prev_logprobs", "entropy", "reference_logprobs"} and set(kept["entropy"]) == set(ids.tolist())
    np.testing.assert_array_equal(kept["prev_logprobs"][43], kept["reference_logprobs"][43])
    columns = {name: batch[name] for name in ("tokens", "lengths", "loss_mask", "generation_logprobs", "advantages")}
    step = Batch({**columns, "row_ids": ids}, {**batch.scalars, "step": 1.0})
    metrics = worker.train_step(step, "policy").flat()
    mean = -(batch["advantages"] * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    assert metrics["loss"] == pytest.approx(mean, abs=1e-5)
    assert metrics["policy/kl"] == pytest.approx(0.0, abs=1e-7)
    inside = batch["loss_mask"] > 0
    entropy = np.concatenate([kept["entropy"][row + 40][inside[row, : len(kept["entropy"][row + 40])]] for row in range(8)])
    assert metrics["policy/entropy"] == pytest.approx(entropy.mean(), rel=1e-5)
    column = np.full(batch["tokens"].shape, -2.0, np.float32)  # computed by another group
    worker.keep_columns(Batch({"lengths": batch["lengths"], "row_ids": ids, "reference_logprobs": column}, {"step": 2.0}))
    held = worker.kept_logprobs()["reference_logprobs"]
    lengths = dict(zip(ids.tolist(), batch["lengths"].tolist(), strict=True))
    assert {row: values.tolist() for row, values in held.items()} == {row: [-2.0] * lengths[row] for row in lengths}
    with pytest.raises(RunError, match="rows whose prev_logprobs this worker does not hold"):
        worker.train_step(step.with_scalars(step=2.0), "policy")


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_reads_the_likeliest_tokens_of_a_teacher(way: str, make: Make, model: Path) -> None:
    """Columns with several values a token, and the policy's log-probabilities of these tokens with their gradients."""
    batch, worker = reference.make_batch(grpo=True), make(**WAYS[way], generation={"temperature": 1.0})
    worker.config = worker.config.with_keys({"algorithm": "dagrl.examples.top_k_distill:TopK"})
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logits = torch.nn.functional.pad(reference.hf_logits(hf, batch)[:, :-1], (0, 0, 1, 0))  # at the token that they predict
    found = worker.top_logprobs(Batch({name: batch[name] for name in ("tokens", "lengths")}), count=K)
    assert found is not None
    scored = batch["loss_mask"] > 0
    best, ids = (values.detach().numpy() for values in logits.log_softmax(-1).topk(K))
    for place, (name, column) in enumerate(NAMES):
        np.testing.assert_array_equal(found[name][scored], ids[..., place][scored])
        np.testing.assert_allclose(found[column][scored], best[..., place][scored], atol=1e-5)
    generator = np.random.default_rng(1)  # another teacher
    ids = generator.permuted(np.tile(np.arange(reference.VOCABULARY), (*batch["tokens"].shape, 1)), axis=-1)[..., :K]
    logprobs = np.log(generator.dirichlet(np.ones(K), batch["tokens"].shape)).astype(np.float32)
    columns = {name: ids[..., place].astype(np.float32) for place, (name, _) in enumerate(NAMES)}
    columns |= {name: logprobs[..., place] for place, (_, name) in enumerate(NAMES)}
    rows = {"lengths": batch["lengths"], "row_ids": np.arange(batch.rows)}
    worker.keep_columns(Batch({**rows, **columns}, {"step": 1.0}))
    trained = {**rows, **{name: batch[name] for name in ("tokens", "loss_mask", "generation_logprobs", "advantages")}}
    metrics = worker.train_step(Batch(trained, {**batch.scalars, "step": 1.0}), "policy").flat()
    teacher = torch.from_numpy(logprobs).log_softmax(-1)
    policy = logits.log_softmax(-1).gather(-1, torch.from_numpy(ids)).log_softmax(-1)
    loss = ((teacher.exp() * (teacher - policy)).sum(-1) * torch.from_numpy(batch["loss_mask"])).sum() / scored.sum()
    loss.backward()
    assert metrics["loss"] == metrics["own/forward_kl"] == pytest.approx(float(loss), abs=1e-5)
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in hf.parameters() if weight.grad is not None])
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_the_reference_policy_is_renewed_every_few_steps(make: Make) -> None:
    """Steps 1, 3 and 5 keep the log-probabilities of the weights before them, the others those of the step before."""
    batch, worker = reference.make_batch(), make()
    rows = {"tokens": batch["tokens"], "lengths": batch["lengths"], "row_ids": np.arange(batch.rows)}
    with replay_context(ReplayContext("older_logprobs", 0, True)):
        worker.snapshot_reference()
        worker.keep_logprobs(Batch(rows, {"step": 0}), "reference", renew_every=2)
    expected: list[Any] = []
    for step in range(1, 6):
        before = worker.logprobs(Batch(rows))
        assert before is not None
        expected.append(before["logprobs"] if step % 2 else expected[-1])
        worker.keep_logprobs(Batch(rows, {"step": step}), "reference", renew_every=2)
        for row, kept in worker.kept_logprobs()["reference_logprobs"].items():
            np.testing.assert_array_equal(kept, expected[-1][row, : len(kept)])
        worker.train_step(batch, "likelihood")


def test_a_checkpoint_continues_bit_for_bit(make: Make, tmp_path: Path) -> None:
    batch, worker = (reference.make_batch(), make(scheduler={"lr_decay_style": "linear", "lr_decay_iters": 5}))
    worker.train_step(batch, "likelihood")
    worker.save_checkpoint(str(tmp_path / "saved"))
    went_on = [worker.train_step(batch, "likelihood").flat() for _ in range(2)]
    after = worker.weight_digests()
    worker.load_checkpoint(str(tmp_path / "saved"))
    saved = worker.weight_digests()
    assert saved.keys() == after.keys() == worker.weight_tensors().keys()
    assert all(saved[name] != after[name] for name in saved)
    again = [worker.train_step(batch, "likelihood").flat() for _ in range(2)]
    assert worker.weight_digests() == after
    for name in ("loss", "grad_norm", "lr"):
        assert [step[name] for step in again] == [step[name] for step in went_on]
    worker.reset_optimizer()
    assert worker.train_step(batch, "likelihood").shared["lr"] == pytest.approx(1e-3)
    assert worker.train_step(batch.with_scalars(lr=3e-4), "likelihood").shared["lr"] == 3e-4, "in place of the schedule's"


def test_gradients_of_two_losses_are_compared_without_a_step(make: Make) -> None:
    """A loss without clip and KL is linear in the advantages."""
    batch, worker = reference.make_batch(grpo=True), make(generation={"temperature": 1.0})
    other = worker.config.with_keys({"loss_fn.name": "reinforce", "loss_fn.reference_policy_kl_penalty": 0.0})
    worker.config, before = other, worker.weight_digests()
    for scale, cosine in ((1.0, 1.0), (3.0, 1.0), (-0.5, -1.0)):
        scaled = batch.with_fields(advantages=scale * batch["advantages"])
        ours, theirs, distance = worker.compare_gradients([batch], [scaled], other)
        norm = ours.shared["grad_norm"]
        assert theirs.shared["grad_norm"] == pytest.approx(abs(scale) * norm)
        assert distance == pytest.approx(abs(scale - 1) * norm, abs=1e-6 * norm)
        other_norm = theirs.shared["grad_norm"]
        assert cosine == pytest.approx((norm**2 + other_norm**2 - distance**2) / (2 * norm * other_norm))
    assert worker.weight_digests() == before
    assert worker.train_step(batch, "policy").shared["grad_norm"] == norm, "nothing is left of the comparison"


def test_a_gradient_that_is_not_finite_skips_the_step(make: Make) -> None:
    batch, worker = reference.make_batch(), make()
    before = {name: tensor.clone() for name, tensor in worker.weight_tensors().items()}
    worker.backend().model.clip = None  # type: ignore[assignment, method-assign]  # not reached
    with torch.no_grad():
        worker.backend().model.weights()["lm_head.weight"].fill_(torch.inf)
    metrics = worker.train_step(batch, "likelihood").shared
    assert metrics["skipped_steps"] == 1 and not np.isfinite(metrics["grad_norm"])
    for name, tensor in worker.weight_tensors().items():
        assert name == "lm_head.weight" or torch.equal(tensor, before[name])


def test_offloaded_state_is_refused_and_comes_back(make: Make, tmp_path: Path) -> None:
    batch, worker = reference.make_batch(), make()
    worker.train_step(batch, "likelihood")
    before = {name: tensor.clone() for name, tensor in worker.weight_tensors().items()}
    worker.offload(("weights", "optimizer"))
    with pytest.raises(RunError, match="worker 0 needs the weights, which are offloaded"):
        worker.logprobs(batch)
    with pytest.raises(ConfigError, match="expected some of weights, gradients, optimizer"):
        worker.offload(("activations",))
    worker.reload(("weights",))
    uses = (partial(worker.train_step, batch, "likelihood"), worker.reset_optimizer)
    for use in (*uses, partial(worker.save_checkpoint, str(tmp_path))):
        with pytest.raises(RunError, match=r"needs the optimizer, which are offloaded; call reload\("):
            use()
    worker.reload(("optimizer",))
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.weight_tensors().items())


def test_an_aborted_worker_raises_until_it_is_reset(make: Make) -> None:
    batch, worker = reference.make_batch(), make()
    worker.abort()
    with pytest.raises(RunError, match="was aborted"):
        worker.logprobs(batch)
    assert worker.reset()
    with pytest.raises(RunError, match="not set up"):
        worker.logprobs(batch)
    worker.setup(f"127.0.0.1:{reserve_port()}")
    assert worker.logprobs(batch) is not None


def test_values_of_a_scalar_head(make: Make, model: Path) -> None:
    """At each token the number of the state before it, computed without padding."""
    worker = make(FsdpValueWorker, **WAYS["packed"])
    batch, net = reference.make_batch(), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    head = worker.backend().model.weights()[SCORE]
    found = worker.values(batch)["values"]
    sums = worker.answer_sums(batch)["sums"]
    with torch.no_grad():
        for row, (tokens, length) in enumerate(zip(batch["tokens"], batch["lengths"], strict=True)):
            states = net.model(torch.tensor(tokens[None, :length])).last_hidden_state[0, :-1]
            expected = np.zeros(batch.tokens, np.float32)
            expected[1:length] = (states @ head[0]).numpy()
            np.testing.assert_allclose(found[row], expected, atol=1e-5)
            assert sums[row] == pytest.approx(float((expected * batch["loss_mask"][row]).sum()), abs=1e-4)


# Parts of train workers: storages in host memory, columns kept by row id, learning rates, and workers of one's own.


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
