"""Both GRPO loops at random timings of engines, rewards, environment and training, without workers (`simulated_run`).

Whatever takes how long: no token is older than the maximal age, nothing is lost or trained on twice, also over a stop and a
resume at any moment; log-probabilities are those of the version noted; metrics are what a count of our own gives.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dagrl.config import Config, EvaluationConfig, RewardConfig, RewardShapingConfig
from dagrl.data.tokenization import Prompt
from dagrl.errors import CheckpointError, RunError
from dagrl.rl.functions.answers import Failed
from dagrl.rl.generation import FIRST_QUANTUM, Generated, RequestProgress, pack_generated
from dagrl.rl.rewards import SampleReward
from dagrl.rl.rollout.episodes import Episode, new_group
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.rollouts import IN_FLIGHT, Rollouts
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.rl.rollout.turns import EnvironmentTurns
from dagrl.run.checkpoint_store import Checkpoint, TrainState
from dagrl.run.engines import WorkerEngines
from dagrl.runtime.shapes import Batch
from tests.unit.run.simulated_run import UNANSWERED, Reward, Run, engines_of, logprob_of

STEPS, PROMPTS, GENERATIONS = 4, 3, 2
seeds = st.integers(0, 1 << 30)
Trained = Mapping[int, Sequence[ScoredGroup]]


def configuration(
    loop: Any, turns: bool = False, dynamic: bool = False, each: int = GENERATIONS, room: int = 40, limit: int = 10
) -> Config:
    vllm = {"data_parallel_size": 2, "max_num_seqs": 3}
    generation = {"max_new_tokens": limit, "quantum_engine_steps": 3, "vllm_cfg": vllm}
    batch = {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": each, "use_dynamic_sampling": dynamic}
    sections: dict[str, Any] = {
        "policy": {"max_total_sequence_length": room, "generation": generation},
        "sft": {"max_num_steps": 0},
        "grpo": {**batch, "max_num_steps": STEPS, "val_period": 2, "val_at_start": False, "async_grpo": dict(loop)},
        "environment": {"function": "simulated:environment" if turns else None},
        "reward": {"max_failed_share": 1.0},
    }
    return Config.model_validate({"name": "simulated", "algorithm": "grpo", "data": {}, **sections})


def asynchronous(age: int, in_flight: bool) -> dict[str, Any]:
    return {"enabled": True, "max_trajectory_age_steps": age, "in_flight_weight_updates": in_flight}


loops = pytest.mark.parametrize("loop", [{}, asynchronous(2, True)], ids=["sync", "async"])


def finished(config: Config, seed: int, state: TrainState | None = None, **keys: Any) -> Run:
    """Returns a run after all its steps, resumed from a state if there is one."""
    run = Run(config, seed, resumed=state and Checkpoint(Path(), state), **keys)
    assert run.train() is None
    return run


def groups_in(trained: Trained) -> list[ScoredGroup]:
    return [group for groups in trained.values() for group in groups]


def numbers_of(trained: Trained) -> list[int]:
    return [group.group.number for group in groups_in(trained)]


def episodes_of(groups: Sequence[ScoredGroup]) -> list[Episode]:
    return [episode for group in groups for episode in group.group.episodes]


def check_tokens(trained: Trained, max_age: int, in_flight: bool = True) -> None:
    """Checks that step `s` trains version `s - 1`: no token is newer, or older by more than `max_age`."""
    for step, groups in trained.items():
        assert len(groups) == PROMPTS and len({group.group.number for group in groups}) == PROMPTS
        for episode in episodes_of(groups):
            assert len(episode.tokens) == len(episode.logprobs) == len(episode.versions) == len(episode.sampled)
            versions = episode.versions.tolist()
            assert versions == sorted(versions)
            made = [version for version, sampled in zip(versions, episode.sampled, strict=True) if sampled]
            assert made and 0 <= step - 1 - max(made) and step - 1 - min(made) <= max_age
            assert in_flight or len(set(made)) == 1, "running sequences finish before an update"
            expected = [logprob_of(v) if s else 0.0 for v, s in zip(versions, episode.sampled, strict=True)]
            assert episode.logprobs.tolist() == expected


@settings(deadline=None, max_examples=15)
@given(seed=seeds, age=st.integers(0, 3), in_flight=st.booleans(), turns=st.booleans(), dynamic=st.booleans())
def test_any_timing_keeps_ages_and_groups(seed: int, age: int, in_flight: bool, turns: bool, dynamic: bool) -> None:
    run = finished(configuration(asynchronous(age, in_flight), turns=turns, dynamic=dynamic), seed)
    assert list(run.trained) == list(range(1, STEPS + 1))
    check_tokens(run.trained, age, in_flight)
    numbers, buffer = numbers_of(run.trained), run.experience.buffer
    assert len(set(numbers)) == len(numbers)
    assert buffer.next_number == len(numbers) + buffer.outstanding + buffer.dropped.total()
    if not dynamic:
        assert sorted(numbers) == list(range(STEPS * PROMPTS)), "no group is started and not trained"
        assert run.reward.checked == [PROMPTS * GENERATIONS] * STEPS, "failures are a share of the step that has them"
    else:
        assert not any(group.samples[0].prompt.text == "3=" for group in groups_in(run.trained))
    check_metrics(run)


@settings(deadline=None, max_examples=15)
@given(seed=seeds, loop=st.sampled_from([{}, asynchronous(0, True), asynchronous(2, True)]), turns=st.booleans())
def test_engines_that_die_at_any_moment_cost_no_step_and_no_group(seed: int, loop: dict[str, Any], turns: bool) -> None:
    """No group is lost, trained twice, or made without weights, whether an engine dies in a quantum or a refit."""
    config = configuration(loop, turns=turns).model_copy(update={"on_failure": "restart"})
    run = finished(config, seed, dying=0.05)
    assert sorted(numbers_of(run.trained)) == list(range(STEPS * PROMPTS))
    check_tokens(run.trained, loop.get("max_trajectory_age_steps", 0))
    for episode in episodes_of(groups_in(run.trained)):
        assert episode.finish_reason in ("stop", "length") and len(episode.tokens) > 0


def test_a_quantum_is_queued_behind_every_update_in_flight() -> None:
    """It is submitted before the refit has ended. The number of quanta in flight stays bounded."""
    run = finished(slow(configuration(asynchronous(2, True), room=80)), seed=0)
    asked, behind, in_flight = False, [], 0
    for name, submitted in run.replays:
        if name == "refit":
            asked = submitted
            behind += [0] if submitted else []
        else:
            in_flight += 1 if submitted else -1
            behind[-1] += asked and submitted
            assert in_flight <= IN_FLIGHT
    assert len(behind) == STEPS + 1 and behind[0] == 0, "no quantum before the first weights"
    assert behind[1:3] == [1, 1], "the groups of all remaining steps are started by the third"


@pytest.mark.parametrize("loop", [{}, asynchronous(0, True)], ids=["sync", "async"])
def test_idle_engines_have_their_next_requests_prepared(loop: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """During training, unless a validation comes first. The first quantum is queued behind the refit."""
    run, while_training, in_refit = Run(configuration(loop), seed=0), list[bool](), list[bool]()
    trained, collect = run.train_on, run.collect

    def watched_training(*words: Any) -> Any:
        while_training.append(run.experience.rollouts.generating)
        return trained(*words)

    def watched_collect(name: str, *words: Any) -> Any:
        in_refit.extend([run.experience.rollouts.generating] * (name == "refit"))
        return collect(name, *words)

    monkeypatch.setattr(run, "train_on", watched_training)
    monkeypatch.setattr(run, "collect", watched_collect)
    assert run.train() is None
    straight_on = [step % 2 == 1 for step in range(1, STEPS + 1)]
    assert in_refit == [False, *straight_on] and while_training == straight_on
    behind = [after == ("generate", True) for before, after in pairwise(run.replays) if before == ("refit", True)]
    assert behind == [False, *straight_on]


@pytest.mark.parametrize("can_wait", [True, False], ids=["environment", "agents"])
def test_agents_do_not_begin_while_workers_train(can_wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clients would wait for the whole training step."""
    monkeypatch.setattr(EnvironmentTurns, "can_wait", can_wait)
    while_training = list[bool]()
    train_on = Run.train_on

    def watched(run: Run, *words: Any) -> Any:
        while_training.append(run.experience.rollouts.busy)
        return train_on(run, *words)

    monkeypatch.setattr(Run, "train_on", watched)
    finished(configuration({}), seed=0)
    assert any(while_training) == can_wait


@loops
def test_validation_prompts_are_scored_in_parallel(loop: Mapping[str, Any]) -> None:
    """Each in its own call with its own deadline, and once."""
    run = finished(configuration(loop), seed=3)
    texts = [completions[0] for completions in run.reward.asked if len(completions) == 1]
    found = [metrics for metrics in run.metrics if "validation/reward" in metrics]
    assert len(found) == STEPS // 2 and len(texts) == 2 * len(found)
    for step, metrics in enumerate(found):
        counted = [len(text) for text in texts[2 * step : 2 * step + 2] if not text.endswith("9")]
        assert metrics["validation/reward"] == pytest.approx(np.mean(counted) if counted else 0.0)
        assert metrics["validation/reward_failures"] == 2 - len(counted)


@loops
def test_standard_sets_are_marked_by_their_own_function(loop: Mapping[str, Any]) -> None:
    """Every third step and after the last one. An answer that cannot be marked is wrong."""
    config = configuration(loop)
    run = Run(config.model_copy(update={"evaluation": EvaluationConfig(sets=("gsm8k", "aime24"), period=3)}), seed=3)
    prompts = [*run.inputs.prompts[:5], Prompt(UNANSWERED, np.array([4, 5]), "", "row 0")]
    run.inputs.evaluation_prompts = [replace(prompt, task=task) for task in ("gsm8k", "aime24") for prompt in prompts]
    assert run.train() is None
    found = {step: metrics for step, metrics in enumerate(run.metrics, start=1) if "evaluation/gsm8k" in metrics}
    assert list(found) == [3, STEPS] and [len(texts) for texts in run.marks.asked] == [1] * 24
    for number, metrics in enumerate(found.values()):
        answers = [answer for (answer,) in run.marks.answers[12 * number : 12 * number + 12]]
        right = sum(not isinstance(answer, Failed) and answer >= 1 for answer in answers)
        assert 0 < right < 12
        assert metrics["evaluation/gsm8k"] + metrics["evaluation/aime24"] == pytest.approx(right / 6)
        assert metrics["evaluation/gsm8k_low"] < metrics["evaluation/gsm8k"] < metrics["evaluation/gsm8k_high"]


@loops
def test_a_validation_without_rewards_ends_a_run_only_above_the_failed_share(loop: Mapping[str, Any]) -> None:
    """With a single validation prompt, one failed sample is all of them."""
    config = configuration(loop)
    tolerant, strict = Run(config, seed=3), Run(config.model_copy(update={"reward": RewardConfig(max_failed_share=0.9)}), 3)
    for run in (tolerant, strict):
        run.inputs.validation_prompts = [Prompt(UNANSWERED, np.array([4, 5]), "", "row 0")]
    assert tolerant.train() is None
    found = [metrics for metrics in tolerant.metrics if "validation/reward" in metrics]
    assert len(found) == STEPS // 2
    assert all((line["validation/reward"], line["validation/reward_failures"]) == (0.0, 1.0) for line in found)
    with pytest.raises(RunError, match=r"1 of 1 samples, more than reward\.max_failed_share = 0\.9"):
        strict.train()


@pytest.mark.parametrize("each", [2, 4])
def test_drop_reasons_are_counted(each: int) -> None:
    """Equal rewards, or fewer than two rewards, counted from the answers of the reward function."""
    reasons: Counter[str] = Counter()
    for seed in range(3):
        run = Run(configuration({}, dynamic=True, each=each).with_keys({"seed": seed}), seed)
        run.inputs.prompts[4] = Prompt(UNANSWERED, np.array([8, 5]), "", "row 4")
        assert run.train() is None
        expected: Counter[str] = Counter()
        for answers in run.reward.answers:
            values = [value for value in answers if not isinstance(value, Failed)]
            if len(answers) > 1 and len(set(values)) < 2:  # none is of a held-out prompt
                expected["failed" if len(values) < 2 else "zero_variance"] += 1
        assert run.experience.buffer.dropped == expected
        assert {reason: run.metrics[-1].get(f"dropped/{reason}", 0) for reason in expected} == expected
        reasons += expected
    assert reasons["failed"] and reasons["zero_variance"]


@loops
@pytest.mark.parametrize(("second", "equal", "failed"), [(Failed("no words"), "0", r"\1"), (SampleReward(1.0), r"\1", "0")])
def test_a_run_that_drops_all_groups_says_why(loop: Any, second: Any, equal: str, failed: str, monkeypatch: Any) -> None:
    """One of two samples in each group has a reward, which `max_failed_share` allows; or both have the same one."""
    monkeypatch.setattr(Reward, "_score_all", lambda *_: [SampleReward(1.0), second])
    reasons = rf"{equal} because their rewards are equal .*, {failed} because .* failed for all of their samples but one"
    with pytest.raises(RunError, match=rf"(\d+) of \1 groups .*: {reasons}"):
        Run(configuration(loop, dynamic=True), seed=0).train()
    monkeypatch.setattr(Reward, "_score_all", lambda *_: [Failed("no words")] * GENERATIONS)
    with pytest.raises(RunError, match=r"reward failed for all \d+ samples: no words"):
        Run(configuration(loop, dynamic=True), seed=0).train()


def check_metrics(run: Run) -> None:
    for metrics, (step, groups) in zip(run.metrics, run.trained.items(), strict=True):
        made = [v for e in episodes_of(groups) for v, sampled in zip(e.versions, e.sampled, strict=True) if sampled]
        ages = step - 1 - np.array(made)
        assert metrics["staleness/policy_age_max"] == ages.max()
        assert metrics["staleness/policy_age_mean"] == pytest.approx(ages.mean())
        texts = [(sample.prompt.text, sample.text) for group in groups for sample in group.samples]
        good = [0.5 if prompt.startswith("3") else len(text) for prompt, text in texts if not text.endswith("9")]
        assert metrics["reward/mean"] == pytest.approx(np.mean(good) if good else 0.0)
        assert metrics["reward/failures"] == len(texts) - len(good)
        assert metrics["timing_s/exposed_generation"] >= 0, "also where nothing was waited for"
    assert run.metrics[-1].get("dropped/zero_variance", 0) <= run.experience.buffer.dropped.get("zero_variance", 0)


@settings(deadline=None, max_examples=10)
@given(timings=st.tuples(seeds, seeds), in_flight=st.booleans(), turns=st.booleans(), dynamic=st.booleans())
def test_age_zero_is_the_synchronous_run_at_any_timing(timings: Any, in_flight: bool, turns: bool, dynamic: bool) -> None:
    """Batches, tokens and rewards are equal, so losses are equal."""
    found = []
    for loop, seed in zip(({}, asynchronous(0, in_flight)), timings, strict=True):
        run = finished(configuration(loop, turns=turns, dynamic=dynamic), seed)
        found.append([[described(group) for group in groups] for groups in run.trained.values()])
    assert found[0] == found[1] and len(found[0]) == STEPS


def described(group: ScoredGroup) -> Any:
    rows = [(one.tokens.tolist(), one.versions.tolist()) for one in group.group.episodes]
    return group.group.number, group.values.tolist(), rows


@settings(deadline=None, max_examples=15)
@given(st.tuples(seeds, seeds), st.integers(0, 3), st.booleans(), st.booleans(), st.integers(1, 15))
def test_a_stop_at_any_moment_loses_nothing(timings: Any, age: int, in_flight: bool, turns: bool, stop_at: int) -> None:
    config = configuration(asynchronous(age, in_flight), turns=turns)
    first = Run(config, timings[0], stop_at=stop_at)
    state = first.train()
    if state is None:  # it had ended by then
        return
    second = finished(config, timings[1], state)
    done = {step: groups for step, groups in first.trained.items() if step <= state.step} | second.trained
    assert list(done) == list(range(1, STEPS + 1)), "no step is counted twice"
    assert sorted(numbers_of(done)) == list(range(STEPS * PROMPTS)), "every group once, over both processes"
    check_tokens(done, age, in_flight)


@pytest.mark.parametrize("turns", [False, True])
def test_a_resumed_run_with_fewer_steps_saves_the_remaining_groups(turns: bool) -> None:
    """Its last step ends while quanta, rewards and the environment still work on groups of the removed steps."""
    left = 0
    for seed in range(6):
        config = slow(configuration(asynchronous(3, True), turns=turns, room=80))
        first = Run(config, seed, stop_at=6)
        state = first.train()
        assert state is not None and state.step < STEPS
        shorter = config.with_keys({"grpo.max_num_steps": state.step + 1})
        second = Run(shorter, seed + 1, resumed=Checkpoint(Path(), state))
        second.inputs.validation_prompts = []  # they would take quanta in which groups end
        assert second.train() is None
        left += len(untrained_in(second.checkpoints.state))
        trained = numbers_of({step: groups for step, groups in first.trained.items() if step <= state.step} | second.trained)
        last = finished(config, seed + 2, second.checkpoints.state)
        assert sorted(trained + numbers_of(last.trained)) == list(range(STEPS * PROMPTS))
    assert left > 0, "there must be something to leave"


def untrained_in(state: TrainState) -> list[int]:
    """Returns the numbers of the groups that a run resumed from this state generates again."""
    return [number for number, _ in cast("list[tuple[int, int]]", state.counters["grpo_untrained"])]


def slow(config: Config) -> Config:
    """Makes few and long sequences at a time, so that some groups are always unfinished."""
    settings = {"max_new_tokens": 40, "quantum_engine_steps": 2, "vllm_cfg.max_num_seqs": 2}
    return config.with_keys({f"policy.generation.{key}": value for key, value in settings.items()})


def test_a_stop_does_not_wait_for_running_sequences_to_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delayed step is completed and saved. The sequences start again, because none may span its update."""
    config = slow(configuration(asynchronous(2, False), room=80))
    first, since, under_way = Run(config, seed=0), 0, set()
    first.inputs.validation_prompts = []  # generated to the end before a step is recorded
    finish_running = Experience.finish_running

    def asked_to_stop(experience: Experience) -> None:
        nonlocal since, under_way
        if experience.rollouts.busy and not under_way:
            first.stop_at = 0
            since, under_way = len(first.replays), experience.rollouts.numbers
        finish_running(experience)

    monkeypatch.setattr(Experience, "finish_running", asked_to_stop)
    state = first.train()
    assert state is not None and under_way and state.step == max(first.trained)
    assert first.replays[since:].count(("generate", True)) <= IN_FLIGHT + 1, "two behind the refit, and one to rest"
    monkeypatch.undo()
    second = finished(config, 1, state)
    check_tokens(second.trained, 2, in_flight=False)
    assert sorted(numbers_of(first.trained | second.trained)) == list(range(STEPS * PROMPTS))


@loops
@pytest.mark.parametrize("at_start", [True, False])
def test_a_stop_in_a_validation_does_not_wait_for_it(loop: Any, at_start: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step it ends the run; after a step it is left out, and the step is recorded."""
    config = slow(configuration(loop, room=80)).with_keys({"grpo.val_at_start": at_start, "grpo.val_period": 1})
    run, begun, found = Run(config, 0), [], []
    run.inputs.validation_prompts = run.inputs.prompts * 4
    run.log = lambda *words: pytest.fail("the validation was cut short")  # type: ignore[method-assign]
    validate = Experience.validate

    def validated(experience: Experience, **options: bool) -> dict[str, float]:
        begun.append(len(run.replays))
        found.append(validate(experience, **options))
        return found[-1]

    monkeypatch.setattr(Experience, "validate", validated)
    run.look = lambda: bool(begun) and len(run.replays) > begun[0]  # type: ignore[method-assign]
    state = run.train()
    assert state is not None and state.step == len(run.trained) == (0 if at_start else 1) and state.metric is None
    assert found == ([] if at_start else [{}])
    assert run.replays[begun[0] :].count(("generate", True)) <= IN_FLIGHT + 1
    assert all(number < STEPS * PROMPTS for number in untrained_in(state)), "validation prompts are in no training group"


def test_a_run_stopped_in_the_first_step_after_sft_resumes_with_its_groups() -> None:
    """The saved state says that the optimizer was reset and the reference policy taken."""
    config = slow(configuration(asynchronous(2, True), room=80)).with_keys({"sft.max_num_steps": 2})
    first = Run(config, 0, stop_at=12)
    first.checkpoints.state = TrainState(2, counters={"sft_sampler": {}})
    state = first.train()
    assert state is not None and state.step == 2 and "sft_sampler" in state.counters
    second = finished(config, 1, state)
    assert sorted(numbers_of(second.trained)) == list(range(STEPS * PROMPTS))


@pytest.mark.parametrize(("made", "running", "learned"), [(FIRST_QUANTUM, True, True), (3, True, True), (3, False, False)])
def test_quantum_times_are_recorded_and_bounded(made: int, running: bool, learned: bool) -> None:
    """Of a whole quantum, of one that the clock ended, and of one that had no request left."""
    by_time = {"policy.generation.quantum_engine_steps": None}  # at most 0.5 s for both in flight
    run, sent = Run(configuration(asynchronous(2, True)).with_keys(by_time), seed=0), list[Batch]()

    def submit(name: str, batch: Batch, rows: object) -> list[Generated]:
        sent.append(batch)
        return [pack_generated([], [RequestProgress(0)] if running else [], made)] * 2

    run.submit = submit  # type: ignore[method-assign]
    turns = EnvironmentTurns(run.config, run.inputs.tokenizer)
    rollouts = Rollouts(run.config, engines_of(run), turns)
    rollouts.start(new_group(run.config, 0, 0, run.inputs.prompts[0], [1, 2]))
    rollouts.advance()
    assert rollouts.quantum_size.step_s == ({0: 1 / made, 1: 1 / made} if learned else {}), "quanta took a second"
    assert [batch.scalars["seconds"] for batch in sent] == [0.25] * IN_FLIGHT, "both within 0.5 s"


@pytest.mark.parametrize("changed", [{"each": 3}, {"room": 14}, {"limit": 8}], ids=str)
def test_a_resumed_run_generates_groups_as_it_is_configured(changed: dict[str, int]) -> None:
    first = Run(configuration(asynchronous(2, True), turns=True), seed=1, stop_at=6)
    state = first.train()
    assert state is not None
    second = finished(configuration(asynchronous(2, True), turns=True, **changed), 1, state)
    done = {step: groups for step, groups in first.trained.items() if step <= state.step}
    assert sorted(numbers_of(done | second.trained)) == list(range(STEPS * PROMPTS))
    for group in groups_in(second.trained):
        assert len(group.samples) == changed.get("each", GENERATIONS)
        assert max(map(len, group.samples)) <= changed.get("room", 40)


@loops
def test_resuming_with_other_prompts_is_an_error(loop: dict[str, Any]) -> None:
    """The number is equal; one reference differs."""
    config = configuration(loop)
    first = Run(config, seed=0, stop_at=6)
    state = first.train()
    assert state is not None
    second = Run(config, 1, resumed=Checkpoint(Path(), state))
    prompts = second.inputs.prompts
    prompts[4] = replace(prompts[4], reference="44")
    with pytest.raises(CheckpointError, match="references or order of the examples differ"):
        second.train()
    assert not second.trained


def test_environment_tokens_do_not_count_as_overlong() -> None:
    """DAPO's penalty counts only tokens of the policy."""
    shaping = RewardShapingConfig(enabled=True, max_response_length=12, overlong_buffer_length=10)
    run = finished(configuration({}, turns=True).with_keys({"grpo.reward_shaping": shaping}), seed=0)
    longer = 0
    for group in groups_in(run.trained):
        for sample, value, reward in zip(group.samples, group.values, group.rewards.values, strict=True):
            length = sum(sample.completion.sampled)
            longer += length < len(sample.completion.tokens)
            assert value - reward == pytest.approx(-min(max(length - 2, 0) / 10, 1), abs=1e-6)
    assert longer


@pytest.mark.parametrize("moves", [None, False, True], ids=["apart", "resident", "exchanging"])
def test_quanta_are_queued_behind_a_refit_unless_memory_moves(moves: bool | None) -> None:
    asked: list[str] = []

    def collect(*_: object, **__: object) -> tuple[list[object], None]:
        asked.append("read")
        return [], None

    shared = None if moves is None else SimpleNamespace(moves=moves)
    replays = SimpleNamespace(shared=shared, submit=lambda *_: asked.append("refit"), collect=collect)
    rollouts = MagicMock(running=True, look_ahead=lambda: asked.append("quantum"), serve=lambda: asked.append("serve"))
    replacement: Any = SimpleNamespace(connect=lambda: asked.append("connect"))
    experience = object.__new__(Experience)
    experience.rollouts, experience.buffer = rollouts, MagicMock()
    experience._engines = WorkerEngines(MagicMock(), cast("Any", replays), MagicMock(), replacement)
    experience.refit(1)
    between = [] if moves else ["quantum"]
    assert asked == ["connect", "refit", *between, "read", "serve"]
