"""Log-probabilities and gradients while training waits for generation, in both loops at random timings (`simulated_run`).

At any timing, every sample is computed once, with the weights of the step that trains on it, and nothing is in flight when a
step is taken or the run stops. The expected value is a formula of token, position and weights. Rows with early gradients and
the remaining rows make up the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.config import Config
from dagrl.config.settings import samples_per_step
from dagrl.errors import PhaseError
from dagrl.rl.rollout.batches import sample_keys, scored_batch
from dagrl.rl.rollout.experience import NextBatch
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.run.loops import early_work, grpo_step
from dagrl.run.loops.early_work import EarlyWork
from dagrl.run.plans import chunk_buckets
from dagrl.run.replay_times import CountedReplay
from dagrl.runtime.replay import ReplayTiming
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.metrics import StepMetrics
from dagrl.workers.train.kept_logprobs import KeptLogprobs
from tests.unit.run.simulated_run import Run
from tests.unit.run.test_async_loop import GENERATIONS, STEPS, asynchronous, configuration, seeds, slow

PHASES = ("logprobs", "reference_logprobs")
GRADIENTS = "accumulate_gradients"
REFERENCE = -1  # its version
AWAY, BACK = "logprob_inference_prep", "training_prep"


def overlapping(
    config: Config, *, offload: bool = False, penalty: float = 0.01, overlap: bool = True, training: bool = False
) -> Config:
    return config.with_keys(
        {
            "grpo.overlap_logprobs": overlap,
            "grpo.overlap_training": training,
            "policy.offload_optimizer_for_logprob": offload,
            "policy.train_global_batch_size": samples_per_step(config),
            "loss_fn.reference_policy_kl_penalty": penalty,
        }
    )


def truth(tokens: npt.NDArray[np.int64], weights: int) -> npt.NDArray[np.float32]:
    """The log-probabilities of tokens [rows, tokens] under the weights of a version."""
    return (-(weights + 2) - tokens / 16 - np.arange(tokens.shape[1]) / 64).astype(np.float32)


@dataclass
class Computing:
    """A replay that ends at tick `due`."""

    run: Overlapping
    name: str
    rows: Batch
    weights: int
    due: int

    def ready(self) -> bool:
        return self.run.world.now >= self.due


class Overlapping(Run):
    """A run whose train workers take time. `events` are the phases submitted, in order."""

    def __init__(self, config: Config, seed: int, *, stop_at: int | None = None, fails: int = 0) -> None:
        super().__init__(config, seed, stop_at=stop_at)
        self.weights, self.events, self.under_way = 0, [], []  # type: ignore[var-annotated]
        self.rows = dict.fromkeys(PHASES, 0)  # computed since the last step
        self.dropped = 0  # rows of groups that were dropped before it
        self.early: list[int] = []  # rows of chunks that were started while sequences of their batch grew
        self.ahead = 0  # replays that were started before all of their batch was sent to the reward functions
        self.parts: list[Batch] = []  # whose gradients are accumulated for the next step
        self.kept = KeptLogprobs()  # of the train workers
        self._fails, self._read, self._free = fails, 0, 0

    def finish_chunk(self) -> None:
        """Lets the train workers finish what was submitted."""
        self.world.now = self._free

    def submit(self, name: str, value: Any, rows: Sequence[npt.NDArray[np.intp]] = ()) -> Any:
        if name not in (*PHASES, GRADIENTS):
            return super().submit(name, value, rows)
        if name == GRADIENTS:
            assert value.scalars["parts"] == len(self.parts)
            self.parts.append(value)
        else:
            self.rows[name] += value.rows
            self.early += [value.rows] * self.experience.rollouts.busy
            groups = sum(len(completions) > 1 for completions in self.reward.asked)  # without validation prompts
            self.ahead += groups < (len(self.trained) + 1) * self.config.grpo.num_prompts_per_step
        self._free = max(self._free, self.world.now) + self.world.random.randint(0, 4)
        self.under_way.append(Computing(self, name, value, self.weights, self._free))
        self.events.append(name)
        return self.under_way[-1]

    def collect(
        self, name: str, replay: Any, busy_s: Callable[[Any], float | None] | None = None
    ) -> tuple[Any, CountedReplay]:
        if name not in (*PHASES, GRADIENTS):
            return super().collect(name, replay, busy_s)
        self.under_way.remove(replay)
        taken = self.experience.buffer.counts().taken
        stopped = self.stop_at is not None and self._checks >= self.stop_at
        assert replay.ready() or taken or stopped, "generation must not wait for a chunk"
        self._read += 1
        if self._read == self._fails:
            raise PhaseError((), "a train worker failed")
        self.world.now = max(self.world.now, replay.due)
        if name in PHASES:
            self.score(name, replay.rows, replay.weights)
        return [], CountedReplay(name, ("train",), ReplayTiming(0.0, 1.0, (1.0,), None), 1.0, 0.0)

    def replay(self, name: str, value: Any, rows: Any = None) -> Any:
        if name == "train_step":
            return [self.take_step(value)]
        self.events.append(name)
        if name not in PHASES:
            return None
        assert not self.under_way
        self.rows[name] += value.rows
        self.score(name, value, self.weights)
        return []

    def score(self, name: str, rows: Batch, weights: int) -> None:
        """Keeps the result of one of `PHASES` on the workers. Entropies are the negated log-probabilities."""
        if name == "logprobs":
            values = truth(rows["tokens"], weights)
            self.kept.keep(rows, prev_logprobs=values, entropy=-values)
        else:
            self.kept.keep(rows, reference_logprobs=truth(rows["tokens"], REFERENCE))

    def _learn(
        self, session: Any, groups: Sequence[ScoredGroup], step: int, early: Any, meanwhile: Any = lambda: None
    ) -> dict[str, float]:
        self.taken = groups
        found = grpo_step.learn(session, groups, step, early, meanwhile)
        return super()._learn(session, groups, step, early) | found

    def take_step(self, rest: Batch) -> StepMetrics:
        """Checks that values are of the current weights and that each row is trained on once; then changes the weights."""
        assert not self.under_way and rest.rows
        penalty = self.config.loss_fn.reference_policy_kl_penalty
        asked = not self.config.loss_fn.force_on_policy_ratio
        needed = [name for name, wanted in {"prev_logprobs": asked, "reference_logprobs": penalty > 0}.items() if wanted]
        for part in (self.kept.join(part, needed) for part in (*self.parts, rest)):
            mask, expected = part["loss_mask"], truth(part["tokens"], self.weights)
            assert [name for name in part.fields if name in ("prev_logprobs", "reference_logprobs")] == needed
            if asked:
                np.testing.assert_array_equal(part["prev_logprobs"], expected * mask)
                np.testing.assert_array_equal(part["entropy"] * mask, -expected * mask)
            if penalty > 0:
                np.testing.assert_array_equal(part["reference_logprobs"], truth(part["tokens"], REFERENCE) * mask)
        learned, rows = sorted(rows_of(*self.parts, rest)), samples_per_step(self.config)
        assert learned == sorted(rows_of(scored_batch(self.config, self.taken, len(self.trained) + 1))), "each row once"
        dropped = sum(self.experience.buffer.counts().dropped.values()) * GENERATIONS
        for name, wanted in {"logprobs": asked, "reference_logprobs": penalty > 0}.items():
            most = rows + dropped - self.dropped
            assert wanted * rows <= self.rows[name] <= wanted * most, "each row once"
        assert rest.number("parts", 0) == len(self.parts)
        self.rows, self.dropped, self.parts = dict.fromkeys(PHASES, 0), dropped, []
        self.events.append("train")
        self.weights += 1
        return StepMetrics({"loss": 0.0})


FIELDS = ("advantages", "generation_logprobs", "loss_mask", "tokens")


def rows_of(*batches: Batch) -> list[tuple[tuple[str, tuple[float, ...]], ...]]:
    """The fields of each row within its length."""
    return [
        tuple((name, tuple(np.atleast_1d(batch[name][row])[:length].tolist())) for name in FIELDS)
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
    check_offload(run.events, offload)


def check_offload(events: Sequence[str], offload: bool, stopped: bool = False) -> None:
    """The optimizer's state is offloaded from before the first log-probabilities of a step until after the last."""
    parts = [list(part) for last, part in groupby(events, lambda event: event == "train") if not last]
    for part in parts:
        assert (part[0] == AWAY, part[-1] == BACK) == (offload, offload)
        inner = part[1:-1] if offload else part
        assert inner and set(inner) <= {*PHASES, GRADIENTS}
    assert len(parts) == events.count("train") + stopped


def test_no_batch_is_made_where_no_log_probabilities_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(early_work, "token_rows", lambda episodes: made.append(len(episodes)))
    config = overlapping(slow(configuration({}, room=80, generations=8)), overlap=False, penalty=0.0)
    run = Overlapping(config.with_keys({"loss_fn.force_on_policy_ratio": True}), 0)
    assert run.train() is None and run.events == ["train"] * STEPS
    assert not made


def test_chunks_begin_before_generation_ends() -> None:
    """Only with the option; else the whole batch begins before its last scores are asked for. Batches and tokens are equal.

    A chunk has at least an eighth of the batch.
    """
    config = slow(configuration({}, room=80, generations=8))
    runs = [Overlapping(overlapping(config, overlap=overlap), 0) for overlap in (False, True)]
    for run in runs:
        assert run.train() is None
    off, on = runs
    assert len(on.early) >= 2 * 2 * STEPS and min(on.early) >= 3 and not off.early
    assert off.events == STEPS * [*PHASES, "train"] and off.ahead >= STEPS
    made = [
        [[e.tokens.tolist() for g in groups for e in g.group.episodes] for groups in run.trained.values()] for run in runs
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("loop", [{}, asynchronous(1, in_flight=True)], ids=["sync", "async"])
def test_gradients_of_scored_groups_start_before_the_batch_is_complete(loop: dict[str, Any]) -> None:
    """For most groups. The last ones are left for the step."""
    parts: list[int] = []

    class Watched(Overlapping):
        def take_step(self, rest: Batch) -> StepMetrics:
            parts.append(sum(part.rows for part in self.parts))
            return super().take_step(rest)

    run = Watched(overlapping(slow(configuration(loop, room=80, generations=8)), training=True), 0)
    assert run.train() is None
    assert len(parts) == STEPS and sum(parts) >= 8 * STEPS
    assert run.events.count(GRADIENTS) >= STEPS


@pytest.mark.parametrize("penalty", [0.0, 0.01])
def test_a_forced_ratio_leaves_the_policys_logprobs_out(penalty: float) -> None:
    """Gradients still start early. Without any log-probability phase, the optimizer's state is not offloaded."""
    config = overlapping(slow(configuration({}, room=80, generations=8)), training=True, penalty=penalty, offload=True)
    run = Overlapping(config.with_keys({"loss_fn.force_on_policy_ratio": True}), 0)
    assert run.train() is None
    asked = {"reference_logprobs", AWAY, BACK} if penalty else set()
    assert set(run.events) == {GRADIENTS, "train"} | asked


def test_in_flight_chunks_begin_while_training_waits_for_its_batch() -> None:
    run = Overlapping(overlapping(slow(configuration(asynchronous(1, in_flight=True), room=80, generations=8))), 0)
    assert run.train() is None
    assert sum(rows >= 3 for rows in run.early) >= 2 * STEPS
    assert sum(run.early) > 0.5 * 2 * 24 * STEPS, "most rows of both phases"


@settings(deadline=None, max_examples=40)
@given(seed=seeds, loop=loops, stop_at=st.integers(1, 30), offload=st.booleans(), training=st.booleans())
def test_after_a_stop_nothing_is_in_flight_and_the_optimizer_is_reloaded(
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
def test_a_failed_chunk_fails_the_run(fails: int, training: bool) -> None:
    run = Overlapping(overlapping(slow(configuration({}, room=80)), offload=True, training=training), 0, fails=fails)
    with pytest.raises(PhaseError, match="a train worker failed"):
        run.train()
    assert run.events[-1] in (*PHASES, GRADIENTS), "nothing more is asked of workers that failed"


def test_groups_not_taken_are_computed_again_after_an_update() -> None:
    """Their step has other weights."""
    run = Overlapping(overlapping(configuration({})), 0)
    run.train()
    groups = [group for batch in run.trained.values() for group in batch]
    run.experience.rollouts = SimpleNamespace(busy=True)
    early = EarlyWork(run.config, cast(Any, run.simulated))
    early.advance(NextBatch(groups[:1]), STEPS + 1)
    early.advance(NextBatch(groups[:1]), STEPS + 1)
    run.finish_chunk()
    early.advance(NextBatch(groups[:2]), STEPS + 1)
    run.finish_chunk()
    assert early.take().known == set(sample_keys(groups[:2]))
    assert run.rows["logprobs"] == 2 * GENERATIONS, "neither was submitted twice"
    run.weights += 1
    early.advance(NextBatch(groups[1:2]), STEPS + 2)
    run.finish_chunk()
    again = early.take().known
    assert again == set(sample_keys(groups[1:2])) and early.take().known == set()
    batch = scored_batch(run.config, groups[1:2], STEPS + 2).with_scalars(step=STEPS + 2)
    found = run.kept.join(batch, ["prev_logprobs", "reference_logprobs"])
    np.testing.assert_array_equal(found["prev_logprobs"], truth(batch["tokens"], run.weights) * batch["loss_mask"])


@pytest.mark.parametrize(("dp", "sizes"), [(1, {3, 6, 12, 24}), (2, {2, 3, 6, 12})])
def test_chunks_of_a_batch_have_their_own_buckets(dp: int, sizes: set[int]) -> None:
    config = configuration({}, generations=8).with_keys({"policy.megatron_cfg.data_parallel_size": dp})
    assert {bucket.sequences for bucket in chunk_buckets(config, early=True)} == sizes
    assert {bucket.sequences for bucket in chunk_buckets(config, early=False)} == {24 // dp}
