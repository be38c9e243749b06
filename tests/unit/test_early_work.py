"""Log-probabilities and gradients while training waits for generation, in both loops at random timings (`simulated_run`).

Whatever takes how long: every sample is computed once, with the weights of the step that trains on it, and nothing is left
under way when a step is taken or a stop was asked for. The truth of each value is a formula of token, place and weights;
rows whose gradients came early are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.config import Config
from dagrl.config.settings import samples_per_step
from dagrl.errors import PhaseError
from dagrl.loops import grpo_step
from dagrl.loops.batches import sample_keys
from dagrl.loops.early import EarlyWork
from dagrl.loops.experience import NextBatch
from dagrl.loops.logprobs import chunk_buckets
from dagrl.loops.replay_times import Counted
from dagrl.loops.scoring import ScoredGroup
from dagrl.replay import ReplayTiming
from dagrl.shapes import Batch
from dagrl.telemetry.metrics import StepMetrics
from tests.unit.simulated_run import Run
from tests.unit.test_async_loop import GENERATIONS, STEPS, asynchronous, configuration, seeds, slow

PHASES = ("logprobs", "reference_logprobs")
GRADIENTS = "accumulate_gradients"
REFERENCE = -1  # its version
AWAY, BACK = "logprob_inference_prep", "training_prep"


def overlapping(
    config: Config, *, offload: bool = False, penalty: float = 0.01, overlap: bool = True, training: bool = False
) -> Config:
    options = {"overlap_logprobs": overlap, "overlap_training": training}
    policy = {"offload_optimizer_for_logprob": offload, "train_global_batch_size": samples_per_step(config)}
    return config.model_copy(
        update={
            "grpo": config.grpo.model_copy(update=options),
            "policy": config.policy.model_copy(update=policy),
            "loss_fn": config.loss_fn.model_copy(update={"reference_policy_kl_penalty": penalty}),
        }
    )


def truth(tokens: npt.NDArray[np.int64], weights: int) -> npt.NDArray[np.float32]:
    """What train workers find for tokens [rows, tokens] under the weights of a version."""
    return (-(weights + 2) - tokens / 16 - np.arange(tokens.shape[1]) / 64).astype(np.float32)


def scored(name: str, rows: Batch, weights: int) -> Batch:
    """The result of one of `PHASES`, as wide as its longest row's bucket; entropies are the negatives."""
    inside = np.arange(rows.tokens) < rows["lengths"][:, None]
    values = truth(rows["tokens"], weights if name == "logprobs" else REFERENCE) * inside
    values = values[:, : rows["lengths"].max()]
    return Batch({"lengths": rows["lengths"], "logprobs": values, "entropy": -values})


@dataclass
class Computing:
    """A replay that is over at tick `due`."""

    run: Overlapping
    name: str
    rows: Batch
    weights: int
    due: int

    def ready(self) -> bool:
        return self.run.world.now >= self.due


class Overlapping(Run):
    """A run whose train workers take their time; `events` is what they were asked for, and learned."""

    def __init__(self, config: Config, seed: int, *, stop_at: int | None = None, fails: int = 0) -> None:
        super().__init__(config, seed, stop_at=stop_at)
        self.session.replay, self.session.step_on = self._replay, self._step_on
        self.weights, self.events, self.under_way = 0, [], []  # type: ignore[var-annotated]
        self.rows = dict.fromkeys(PHASES, 0)  # computed since the last step
        self.dropped = 0  # rows of groups that were dropped before it
        self.early: list[int] = []  # rows of chunks that were started while sequences of their batch grew
        self.parts: list[Batch] = []  # whose gradients are accumulated for the next step
        self._fails, self._read, self._free = fails, 0, 0

    def finish_chunk(self) -> None:
        """Let the train workers come to the end of what they were asked for."""
        self.world.now = self._free

    def _submit(self, name: str, value: Any, rows: Sequence[npt.NDArray[np.intp]] = ()) -> Any:
        if name not in (*PHASES, GRADIENTS):
            return super()._submit(name, value, rows)
        if name == GRADIENTS:
            assert value.scalars["parts"] == len(self.parts)
            self.parts.append(value)
        else:
            self.rows[name] += value.rows
            self.early += [value.rows] * self.experience.rollouts.busy
        self._free = max(self._free, self.world.now) + self.world.random.randint(0, 4)
        self.under_way.append(Computing(self, name, value, self.weights, self._free))
        self.events.append(name)
        return self.under_way[-1]

    def _collect(self, name: str, replay: Any, busy_s: Callable[[Any], float | None] | None = None) -> tuple[Any, Counted]:
        if name not in (*PHASES, GRADIENTS):
            return super()._collect(name, replay, busy_s)
        self.under_way.remove(replay)
        taken = self.experience.buffer.counts().taken
        stopped = self.stop_at is not None and self._checks >= self.stop_at
        assert replay.ready() or taken or stopped, "generation must not wait for a chunk"
        self._read += 1
        if self._read == self._fails:
            raise PhaseError((), "a train worker failed")
        self.world.now = max(self.world.now, replay.due)
        result = scored(name, replay.rows, replay.weights) if name in PHASES else []
        return result, Counted(name, ("train",), ReplayTiming(0.0, 1.0, (1.0,), None), 1.0, 0.0)

    def _replay(self, name: str, value: Any) -> Any:
        self.events.append(name)
        if name not in PHASES:
            return None
        assert not self.under_way
        self.rows[name] += value.rows
        return scored(name, value, self.weights)

    def _learn(self, session: Any, groups: Sequence[ScoredGroup], step: int, early: Any) -> dict[str, float]:
        found = grpo_step.learn(session, groups, step, early)
        return super()._learn(session, groups, step, early) | found

    def _step_on(self, phase: str, batch: Batch, rows: Sequence[int] | None = None, parts: int = 0) -> StepMetrics:
        """Every value is that of the present weights, and each row is learned from once; then there are new weights."""
        assert phase == "train_step" and not self.under_way
        penalty = self.config.loss_fn.reference_policy_kl_penalty
        mask, expected = batch["loss_mask"], truth(batch["tokens"], self.weights)
        asked = not self.config.loss_fn.force_on_policy_ratio
        np.testing.assert_array_equal(batch["prev_logprobs"], expected * mask * asked)
        np.testing.assert_array_equal(batch["reference_logprobs"], truth(batch["tokens"], REFERENCE) * mask * (penalty > 0))
        dropped = sum(self.experience.buffer.counts().dropped.values()) * GENERATIONS
        for name, wanted in {"logprobs": asked, "reference_logprobs": penalty > 0}.items():
            most = batch.rows + dropped - self.dropped
            assert wanted * batch.rows <= self.rows[name] <= wanted * most, "each row once"
        assert parts == len(self.parts)
        rest = batch if rows is None else batch.select(rows)
        assert rest.rows
        assert sorted(rows_of(*self.parts, rest)) == sorted(rows_of(batch))
        self.rows, self.dropped, self.parts = dict.fromkeys(PHASES, 0), dropped, []
        self.events.append("train")
        self.weights += 1
        return StepMetrics({"expected_entropy": float(-(expected * mask).sum() / mask.sum())})


def rows_of(*batches: Batch) -> list[tuple[tuple[str, tuple[float, ...]], ...]]:
    """What each row has within its length, field by field."""
    return [
        tuple((name, tuple(np.atleast_1d(array[row])[:length].tolist())) for name, array in sorted(batch.fields.items()))
        for batch in batches
        for row, length in enumerate(batch["lengths"].tolist())
    ]


loops = st.one_of(st.just({}), st.builds(asynchronous, st.integers(0, 3), st.booleans()))


@settings(deadline=None, max_examples=30)
@given(
    seed=seeds,
    loop=loops,
    turns=st.booleans(),
    dynamic=st.booleans(),
    offload=st.booleans(),
    penalty=st.sampled_from([0.0, 0.01]),
    training=st.booleans(),
)
def test_every_sample_is_computed_once_with_the_weights_of_its_step(
    seed: int, loop: dict[str, Any], turns: bool, dynamic: bool, offload: bool, penalty: float, training: bool
) -> None:
    config = configuration(loop, turns=turns, dynamic=dynamic)
    run = Overlapping(overlapping(config, offload=offload, penalty=penalty, training=training), seed)
    assert run.train() is None
    assert len(run.trained) == run.weights == STEPS
    for metrics in run.metrics:
        assert metrics["policy/entropy"] == pytest.approx(metrics["expected_entropy"], rel=1e-6)
    check_offload(run.events, offload)


def check_offload(events: Sequence[str], offload: bool, stopped: bool = False) -> None:
    """The optimizer's state is away from before the first log-probability of a step until after the last one."""
    parts = [list(part) for last, part in groupby(events, lambda event: event == "train") if not last]
    for part in parts:
        assert (part[0] == AWAY, part[-1] == BACK) == (offload, offload)
        inner = part[1:-1] if offload else part
        assert inner and set(inner) <= {*PHASES, GRADIENTS}
    assert len(parts) == events.count("train") + stopped


def test_chunks_begin_before_generation_ends() -> None:
    """With the option alone; batches and tokens are those of the run without it. Chunks have an eighth of it at least."""
    config = slow(configuration({}, room=80, generations=8))
    runs = [Overlapping(overlapping(config, overlap=overlap), 0) for overlap in (False, True)]
    for run in runs:
        assert run.train() is None
    off, on = runs
    assert len(on.early) >= 2 * 2 * STEPS and min(on.early) >= 3 and not off.early
    assert off.events == STEPS * [*PHASES, "train"]
    made = [[[e.tokens for g in groups for e in g.group.episodes] for groups in run.trained.values()] for run in runs]
    assert made[0] == made[1]


@pytest.mark.parametrize("loop", [{}, asynchronous(1, in_flight=True)], ids=["sync", "async"])
def test_gradients_of_scored_groups_come_before_their_batch_is_whole(loop: dict[str, Any]) -> None:
    """Of most groups; the batch's last are left for its step."""
    parts: list[int] = []

    class Watched(Overlapping):
        def _step_on(self, *words: Any) -> StepMetrics:
            parts.append(sum(part.rows for part in self.parts))
            return super()._step_on(*words)

    run = Watched(overlapping(slow(configuration(loop, room=80, generations=8)), training=True), 0)
    assert run.train() is None
    assert len(parts) == STEPS and sum(parts) >= 8 * STEPS
    assert run.events.count(GRADIENTS) >= STEPS


@pytest.mark.parametrize("penalty", [0.0, 0.01])
def test_a_forced_ratio_leaves_the_policys_logprobs_out(penalty: float) -> None:
    """Gradients come early all the same; with neither policy nor reference to ask, nothing leaves the GPU for them."""
    config = overlapping(slow(configuration({}, room=80, generations=8)), training=True, penalty=penalty, offload=True)
    forced = config.loss_fn.model_copy(update={"force_on_policy_ratio": True})
    run = Overlapping(config.model_copy(update={"loss_fn": forced}), 0)
    assert run.train() is None
    asked = {"reference_logprobs", AWAY, BACK} if penalty else set()
    assert set(run.events) == {GRADIENTS, "train"} | asked
    assert not any("policy/entropy" in metrics for metrics in run.metrics), "the step itself reports it"


def test_in_flight_chunks_begin_while_training_waits_for_its_batch() -> None:
    run = Overlapping(overlapping(slow(configuration(asynchronous(1, in_flight=True), room=80, generations=8))), 0)
    assert run.train() is None
    assert sum(rows >= 3 for rows in run.early) >= 2 * STEPS
    assert sum(run.early) > 0.5 * 2 * 24 * STEPS, "most rows of both phases"


@settings(deadline=None, max_examples=40)
@given(seed=seeds, loop=loops, stop_at=st.integers(1, 30), offload=st.booleans(), training=st.booleans())
def test_after_a_stop_nothing_is_under_way_and_the_optimizer_is_back(
    seed: int, loop: dict[str, Any], stop_at: int, offload: bool, training: bool
) -> None:
    config = overlapping(slow(configuration(loop, room=80)), offload=offload, training=training)
    run = Overlapping(config, seed, stop_at=stop_at)
    if run.train() is None:  # it had ended by then
        return
    assert not run.under_way
    check_offload(run.events, offload, stopped=run.events[-1] != "train")


@pytest.mark.parametrize("fails", [1, 2, 3, 6])
@pytest.mark.parametrize("training", [False, True])
def test_the_failure_of_a_chunk_is_the_runs(fails: int, training: bool) -> None:
    run = Overlapping(overlapping(slow(configuration({}, room=80)), offload=True, training=training), 0, fails=fails)
    with pytest.raises(PhaseError, match="a train worker failed"):
        run.train()
    assert run.events[-1] in (*PHASES, GRADIENTS), "nothing more is asked of workers that failed"


def test_what_is_left_over_is_computed_anew_after_an_update() -> None:
    """A group that was computed and not taken: its next step has other weights."""
    run = Overlapping(overlapping(configuration({})), 0)
    run.train()
    groups = [group for batch in run.trained.values() for group in batch]
    run.experience.rollouts = SimpleNamespace(busy=True)
    early = EarlyWork(run.session)
    early.advance(NextBatch(groups[:1]))
    early.advance(NextBatch(groups[:1]))
    run.finish_chunk()
    early.advance(NextBatch(groups[:2]))
    run.finish_chunk()
    assert set(early.take().known) == set(sample_keys(groups[:2]))
    assert run.rows["logprobs"] == 2 * GENERATIONS, "neither was submitted twice"
    run.weights += 1
    early.advance(NextBatch(groups[1:2]))
    run.finish_chunk()
    again = early.take().known
    assert set(again) == set(sample_keys(groups[1:2])) and early.take().known == {}
    for place, episode in enumerate(groups[1].group.episodes):
        tokens = np.concatenate([episode.prompt.tokens, episode.tokens])
        found = again[groups[1].group.number, place]["logprobs"][: len(tokens)]
        np.testing.assert_array_equal(found, truth(tokens[None], run.weights)[0])


@pytest.mark.parametrize(("dp", "sizes"), [(1, {3, 6, 12, 24}), (2, {2, 3, 6, 12})])
def test_parts_of_a_batch_have_buckets_of_their_own(dp: int, sizes: set[int]) -> None:
    config = configuration({}, generations=8)
    megatron = config.policy.megatron_cfg.model_copy(update={"data_parallel_size": dp})
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"megatron_cfg": megatron})})
    assert {bucket.sequences for bucket in chunk_buckets(config, early=True)} == sizes
    assert {bucket.sequences for bucket in chunk_buckets(config, early=False)} == {24 // dp}
