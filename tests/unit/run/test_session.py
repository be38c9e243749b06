"""The pieces of a session and of the SFT loop: ranking metric, reference policy, validation, times; rates, buckets."""

import math
import os
import re
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest

from dagrl.config import Config, PolicyConfig
from dagrl.config.plan import RunPlan
from dagrl.data import Sampler, open_sampler
from dagrl.data.tokenization import Demonstration, Prompt
from dagrl.errors import CheckpointError, ConfigError, RunError, StopRequestedError
from dagrl.refit import RefitReport
from dagrl.rl.rollout.rollouts import QuantumSize
from dagrl.run.checkpoint_store import Checkpoint, TrainState
from dagrl.run.checkpoints import Checkpoints, ranking_metric
from dagrl.run.engines import ReplayedRefit, mean_pause
from dagrl.run.loops import grpo
from dagrl.run.loops.grpo import exposed, start_policy
from dagrl.run.loops.optimizer_step import replay_batch
from dagrl.run.loops.policy_update import PolicyTrainer
from dagrl.run.loops.sft import evaluate, learning_rate, train_sft
from dagrl.run.plans import train_buckets
from dagrl.run.preflight import Inputs, limit_steps
from dagrl.run.replays import CountedReplay, Replays
from dagrl.run.resume import REFERENCE, NoStepsLeftError, check_reference, check_stage, check_steps_left
from dagrl.run.session import LastStep, Session, Stage, UpdateCount, log_sharing
from dagrl.run.start import run_session, with_absolute_paths
from dagrl.run.stop import StopSignal
from dagrl.runtime.replay import Replay, ReplayTiming
from dagrl.runtime.shapes import Batch, Bucket
from dagrl.telemetry.metrics import StepMetrics
from dagrl.telemetry.record import RunPaths
from dagrl.telemetry.timing import PhaseClock

STEP = {"loss": 0.5, "reward/mean": 0.1}
VALIDATED = {"validation/reward": 0.4}


def configuration(metric: str | None = None, penalty: float = 0.01) -> Config:
    keys = {"checkpointing": {"metric_name": metric}, "loss_fn": {"reference_policy_kl_penalty": penalty}}
    return Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": {"generation": {}}, **keys})


def metric(name: str | None, metrics: dict[str, float], stage: str = "grpo") -> float | None:
    return ranking_metric(configuration(name), stage, metrics)


def test_a_checkpoint_is_ranked_by_the_metric_of_its_own_step() -> None:
    assert metric(None, STEP) is None
    assert metric("reward/mean", STEP) == 0.1
    assert metric("validation/reward", STEP | VALIDATED) == 0.4
    assert metric("validation/reward", STEP) is None  # not the last one measured
    assert metric("validation/reward", STEP | {"validation/loss": 1.0}, stage="sft") is None  # the phase before GRPO
    assert metric("reward/mean", VALIDATED) is None  # before the first step
    assert metric("reward/mean", {"masked_minibatches": 2.0}) is None
    for name, metrics in (("validation/rewards", VALIDATED), ("reward", STEP), ("validation/rewards", STEP | VALIDATED)):
        with pytest.raises(ConfigError, match=f"metric_name is '{name}'.* it has: .*{min(metrics)}"):
            metric(name, metrics)


@pytest.mark.parametrize(("norm", "warned"), [(0.0, True), (math.nan, True), (math.inf, True), (0.5, False), (None, False)])
def test_a_skipped_optimizer_step_is_logged(norm: float | None, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A norm of None is that of accumulated gradients."""
    shared = {"skipped_steps": 2.0, **({} if norm is None else {"grad_norm": norm})}
    replays: Any = MagicMock(collect=lambda *words: ([StepMetrics({"loss": 1.0}, {}, shared)], None))
    replay_batch(replays, "train_step", Batch({"loss_mask": np.ones((1, 2)), "lengths": np.array([2])}), step=7)
    told = f"step 7: gradient norm is {norm}: optimizer step skipped, weights unchanged (2 so far)"
    assert (told in caplog.text) == warned and (bool(caplog.text) == warned)


def test_what_shared_prefixes_save_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for chosen, share in ((True, 0.4), (True, 0.0), ("auto", 0.0)):
        packing = {"shared_prefix": chosen, "train_mb_tokens": 20}
        log_sharing(PolicyConfig.model_validate({"sequence_packing": packing}), share)
    assert re.search(r"save 40 % of the tokens\n.* 0.0 % .* 20 tokens. Raise .*false\n$", caplog.text)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_stop_saves_if_checkpoints_are_enabled(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    session = MagicMock(config=SimpleNamespace(checkpointing=SimpleNamespace(enabled=enabled)))
    monkeypatch.setattr("dagrl.run.start.open_session", lambda *args: nullcontext(session))
    with pytest.raises(StopRequestedError), run_session(configuration()):
        raise StopRequestedError
    assert session.checkpoints.save_last.called == enabled


@pytest.mark.parametrize(("penalty", "kept"), [(0.01, True), (0.0, False)])
def test_a_run_takes_a_reference_policy_only_for_a_penalty(penalty: float, kept: bool) -> None:
    config = configuration(penalty=penalty)
    parts: Any = {name: MagicMock() for name in ("replays", "train", "stop", "log", "thread")}
    PolicyTrainer(config, RunPlan.of(config), media=False, **parts).start()
    called = [call.args[0] for call in parts["train"].call.call_args_list]
    assert called == [*(["snapshot_reference"] if kept else []), "reset_optimizer"]
    assert parts["replays"].hold.called


@pytest.mark.parametrize("resumed", ["", "sft", "grpo"])
def test_how_grpo_begins(resumed: str) -> None:
    """After an SFT stage of 3 steps, resumed or not. A run resumed in GRPO restores its state instead."""
    done: list[Any] = []
    step, counters = (5, {"grpo_sampler": {}}) if resumed == "grpo" else (3, {"sft_sampler": {}})
    state = TrainState(step, counters)
    checkpoint = Checkpoint(Path("step_00000005"), state) if resumed else None
    checkpoints = Checkpoints(*[MagicMock()] * 5, resumed=checkpoint, state=state)
    session: Any = MagicMock(checkpoints=checkpoints, step=step, reference_counter={REFERENCE: True})
    session.record_initial_validation = lambda stage, metrics: done.append((stage.name, metrics))
    session.replays.close_step = lambda tokens: done.append("lap")
    experience: Any = SimpleNamespace(
        state=lambda: {"grpo_next_group": 0},
        take_untrained=list,
        validate=lambda *, may_stop: {"may_stop": may_stop},
        evaluate=lambda *, may_stop: {"evaluated": may_stop},
        restore=done.append,
        refit=lambda version: done.append(("refit", version)),
    )
    trainer: Any = SimpleNamespace(start=lambda: done.append("first"))
    start_policy(session, Stage("grpo", 3, 8, 0, val_at_start=True), experience, trainer)
    begins = ["first", ("refit", 3), ("grpo", {"may_stop": True, "evaluated": True}), "lap"]
    goes_on = [("refit", 5), counters, "lap"]
    assert done == (goes_on if resumed == "grpo" else begins)
    added = {} if resumed == "grpo" else {"grpo_next_group": 0, REFERENCE: True}
    assert checkpoints.state.counters == counters | added


@pytest.mark.parametrize(("period", "validated"), [(2, [2, 4, 5]), (0, [5]), (3, [3, 5])])
def test_a_stage_validates_by_its_own_step_count_and_at_the_end(period: int, validated: list[int]) -> None:
    """Five steps after a stage of 3."""
    config = configuration().with_keys({"grpo.max_num_steps": 5, "grpo.val_period": period})
    stage = Stage.of("grpo", config.grpo, after=3)
    assert [step - 3 for step in range(4, stage.last + 1) if stage.validates(step)] == validated


STOPPED, DUE = MagicMock(requested=True), MagicMock(due=lambda step: True)


@pytest.mark.parametrize("changed", [{}, {"stop": STOPPED}, {"checkpoints": DUE}, {"last_step": LastStep(1)}])
def test_files_of_samples_are_complete_before_a_checkpoint(changed: dict[str, Any]) -> None:
    """Nothing may start early before a step whose state is saved, or which is the last."""
    done: list[str] = []
    rollouts = SimpleNamespace(flush=lambda: done.append("flushed"))
    recorder: Any = SimpleNamespace(step=lambda *step: done.append("recorded"), rollouts=rollouts)
    pieces = {"stop": MagicMock(requested=False), "checkpoints": MagicMock(due=lambda step: False), **changed}
    parts = dict.fromkeys(("inputs", "train", "generation", "replays"), MagicMock())
    config = configuration()
    session = Session(config=config, plan=RunPlan.of(config), **parts, recorder=recorder, **pieces)
    assert session.goes_straight_on(1) == (not changed)
    with pytest.raises(StopRequestedError) if "last_step" in changed else nullcontext():
        session.finish_step(Stage("grpo", 0, 9, 0, val_at_start=False), 1, {}, {})
    assert done == [*(["flushed"] if "checkpoints" in changed else []), "recorded"]


def test_exposed_generation_is_summed_over_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "time", MagicMock(**{"perf_counter.side_effect": [1.0, 3.0, 10.0, 14.0]}))
    metrics = {"timing_s/exposed_generation": 0.0}
    for _ in range(2):
        with exposed(metrics):
            pass
    assert metrics == {"timing_s/exposed_generation": 6.0}


def test_the_pause_of_a_refit_is_that_of_the_slowest_generation_worker() -> None:
    """A worker that reports no pause counts with the time of its receive. Senders do not count."""
    sender = RefitReport(1, 16, 0, 9.0)
    reports = [RefitReport(1, 0, 8, 0.5), [RefitReport(1, 0, 8, 0.1, 2.0), sender], RefitReport(1, 0, 8, 0.2, 1.0)]
    replays: Any = MagicMock(collect=lambda *words, **keys: (reports, None))
    assert ReplayedRefit(replays, MagicMock()).result() == {"timing_s/update_pause": 2.0, "perf/refit_bytes": 24.0}
    assert mean_pause(reports) == pytest.approx(3.5 / 3) and mean_pause([sender]) is None


def third_step(**counters: Any) -> Checkpoint:
    return Checkpoint(Path("step_00000003"), TrainState(3, counters=counters))


def test_resuming_without_the_needed_reference_policy_is_an_error() -> None:
    config, no_penalty = configuration(), configuration(penalty=0.0)
    plan, without = RunPlan.of(config), third_step(**{REFERENCE: False})
    check_reference(no_penalty, RunPlan.of(no_penalty), without)
    check_reference(config, plan, third_step(**{REFERENCE: True}))
    check_reference(config, plan, third_step(sft_sampler={}))
    with pytest.raises(ConfigError, match=r"penalty is 0\.01\), but step_00000003 has none"):
        check_reference(config, plan, without)


def test_resuming_with_sft_steps_after_those_of_grpo_is_an_error() -> None:
    config = configuration().with_keys({"sft.max_num_steps": 4})
    plan = RunPlan.of(config)
    check_stage(config.with_keys({"sft.max_num_steps": 3}), plan, third_step(grpo_sampler={}))
    check_stage(config, plan, third_step(sft_sampler={}))
    with pytest.raises(ConfigError, match=r"max_num_steps is 4, but step_00000003 is of step 3, after grpo had begun"):
        check_stage(config, plan, third_step(grpo_sampler={}))


def test_a_run_without_steps_left_ends_unless_its_model_is_still_to_write(tmp_path: Path) -> None:
    checkpoint, model = tmp_path / "step_00000003", tmp_path / "final_model"
    saved = Checkpoint(checkpoint, TrainState(3, counters={"grpo_sampler": {}}))
    config = configuration().with_keys({"sft.max_num_steps": 1, "grpo.max_num_steps": 2})
    plan = RunPlan.of(config)
    checkpoint.mkdir()
    check_steps_left(config, plan, saved, model)  # killed before it wrote its model
    without = config.with_keys({"checkpointing.export_hf": False})
    check_steps_left(without.with_keys({"grpo.max_num_steps": 3}), plan, saved, model)
    says = r"sft\.max_num_steps=1, grpo\.max_num_steps=2\): .*step_00000003 is of step 3"
    with pytest.raises(NoStepsLeftError, match=says):
        check_steps_left(without, plan, saved, model)
    model.mkdir()
    (model / "config.json").touch()
    with pytest.raises(NoStepsLeftError):
        check_steps_left(config, plan, saved, model)
    os.utime(model / "config.json", (0, 0))
    check_steps_left(config, plan, saved, model)  # an earlier end of the run wrote it


def test_workers_get_absolute_paths_of_model_and_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = configuration().with_keys({"policy.tokenizer.name": "own"})
    for config, tokenizer in ((own, str(tmp_path / "own")), (configuration(), None)):
        named = with_absolute_paths(config, Path("model")).policy
        assert (named.model_name, named.tokenizer.name) == (str(tmp_path / "model"), tokenizer)


def test_an_export_that_the_driver_does_not_see_is_an_error(tmp_path: Path) -> None:
    run = configuration().with_keys({"output_dir": str(tmp_path), "checkpointing.enabled": False})
    recorder: Any = MagicMock(paths=RunPaths.of(run))
    parts: Any = dict.fromkeys(("inputs", "train", "generation", "replays", "checkpoints", "stop"), MagicMock())
    session = Session(config=run, plan=RunPlan.of(run), recorder=recorder, **parts)
    with pytest.raises(CheckpointError, match=r"final_model/config\.json, but .* do not share this directory"):
        session.finish()
    assert not recorder.paths.final_model.exists()


ROLES: dict[str, tuple[str, ...]] = {"train_step": ("train",), "refit": ("train", "generation"), "generate": ("generation",)}


def timed_replays(seconds: float) -> Replays:
    """Replays whose steps take `seconds`, of a train group and two generation shards."""
    phases: Any = {name: SimpleNamespace(roles=roles) for name, roles in ROLES.items()}
    scheduler: Any = SimpleNamespace(groups={"train": None, "generation": None})
    clock = PhaseClock()
    clock.close_step = lambda: {"timing_s/total": seconds}  # type: ignore[method-assign]
    return Replays(phases, scheduler, clock, devices=3)


def read(replays: Replays, name: str, timing: ReplayTiming, reports: object = None) -> CountedReplay:
    replay = SimpleNamespace(result=lambda: reports, timing=timing)
    return replays.collect(name, cast("Replay", replay), busy_s=mean_pause if name == "refit" else None)[1]


def test_idle_shares_follow_the_workers_timelines() -> None:
    """Each step of 10 s: training is done at 4 s, its refit waits until 6 s for the quanta before it, and takes 1 s.

    The first shard runs its quanta without a gap, the second one for half as long. The quantum that ends in the next step is
    read there.
    """
    replays = timed_replays(10.0)
    idle: dict[str, list[float]] = {"train": [], "generation": []}
    for start in (0.0, 10.0, 20.0):
        pauses = [RefitReport(1, 0, 8, 0.9, pause_s=1.0)] * 2
        read(replays, "train_step", ReplayTiming(start, start + 4, (4.0,), None))
        read(replays, "refit", ReplayTiming(start + 4, start + 7, (3.0,), None), [RefitReport(1, 16, 0, 3.0), pauses])
        read(replays, "generate", ReplayTiming(start - 4, start + 7, (6.0, 3.0), None))  # ran until the refit's turn
        if start:  # in the first step the last quantum is still unread
            read(replays, "generate", ReplayTiming(start - 3, start + 7, (3.0, 1.5), None))
        metrics = replays.close_step(tokens=30)
        for role, shares in idle.items():
            shares.append(metrics[f"idle/{role}"])
    assert idle["train"] == pytest.approx([0.5, 0.5, 0.5]), "4 s of training and 1 s of the refit; a wait is not work"
    assert idle["generation"] == pytest.approx([0.45, 0.225, 0.225]), "(6 + 3) / 2 s, (3 + 1.5) / 2 s, and 1 s of the refit"


def test_work_of_an_earlier_step_is_counted_once() -> None:
    """The engines ran 23 of 30 s. The mean of the steps' shares shows that, whichever step reads a quantum."""
    replays = timed_replays(10.0)
    idle = []
    for busy in ((2.0, 2.0), (8.0, 6.0), (5.0,)):
        for seconds in busy:
            read(replays, "generate", ReplayTiming(0.0, 1.0, (seconds,), None))
        idle.append(replays.close_step(tokens=1)["idle/generation"])
    assert idle == pytest.approx([0.6, 0.0, 0.1])
    assert np.mean(idle) == pytest.approx(1 - 23 / 30)


Submitted = tuple[str, float, float, float]  # a phase, its submission and end, and how long it ran


class SimulatedEngine:
    """Runs submissions in order, each after an idle millisecond."""

    def __init__(self, replays: Replays) -> None:
        self.replays, self.now, self.free = replays, 0.0, 0.0

    def submit(self, name: str, seconds: float) -> Submitted:
        self.now += 1e-6  # no two at once
        self.free = max(self.free, self.now) + 0.001 + seconds
        return name, self.now, self.free, seconds

    def read(self, submitted: Submitted) -> CountedReplay:
        name, started, ended, seconds = submitted
        self.now = max(self.now, ended)
        return read(self.replays, name, ReplayTiming(started, self.now, (seconds,), None), [])


@pytest.mark.parametrize("last_s", [0.1, 0.0], ids=["updates in flight", "all has ended before an update"])
def test_waits_for_a_refit_or_a_checkpoint_are_no_overhead(last_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quanta of 10 steps of 10 ms, 1 ms apart, two in flight: the waits change neither their overhead nor their size."""
    replays, size = timed_replays(10.0), QuantumSize(None, seconds=10.0, in_flight=2)
    engine, quanta = SimulatedEngine(replays), deque[Submitted]()
    monkeypatch.setattr("dagrl.run.replays.time.perf_counter", lambda: engine.now)
    for number in range(60):
        while len(quanta) < 2:
            quanta.append(engine.submit("generate", last_s if number % 6 in (2, 3) else 0.1))
        if number % 6 == 3:  # a refit of 0.8 s behind both; the driver, at the step's end, then reads what ended before
            engine.read(engine.submit("refit", 0.8))
            engine.now += 0.04
        if number % 6 == 5:  # a checkpoint of 3 s, after which the quanta are read that had ended meanwhile
            engine.now += 3.0
            replays.times.exclude_wait("generation")
        counted = engine.read(quanta.popleft())
        size.record([10 if counted.busy_s else 0], counted.timing.shards_busy_s, counted.overhead_s)
    assert size.overhead_s is not None and size.overhead_s <= 0.001 + 1e-9
    assert size.next() <= (14,), "1 ms is 0.75 % of 133 ms"
    assert replays.close_step(tokens=1)["perf/quantum_overhead"] <= 0.01


def test_the_overhead_of_a_step_is_its_time_minus_the_longest_paths() -> None:
    """Steps of 10 s. Compute that overlaps, also across steps, counts once."""
    replays, overheads = timed_replays(10.0), []
    steps: list[list[tuple[str, float, float, tuple[float, ...]]]] = [
        [("generate", 0.0, 4.0, (3.5, 1.0)), ("train_step", 4.5, 9.0, (4.0,))],
        [("train_step", 11.0, 16.0, (5.0,)), ("generate", 9.0, 18.0, (9.0,))],
        [("generate", 17.0, 29.0, (11.0,))],  # a second of it in the step before
        [],
    ]
    for step in steps:
        for name, *timing in step:
            read(replays, name, ReplayTiming(*timing, None))
        overheads.append(replays.close_step(tokens=1)["perf/step_overhead_s"])
    assert overheads == pytest.approx([2.5, 1.0, 0.0, 9.0])
    assert sum(overheads) == pytest.approx(40.0 - (3.5 + 4.0 + 9.0 + 11.0))


def config_of_sft(algorithm: str, sft: dict[str, Any], dp: int = 1) -> Config:
    rates = {"optimizer": {"lr": 2e-4}, "scheduler": {"lr_decay_style": "cosine"}}
    sizes = {"train_micro_batch_size": 8, "sequence_buckets": [16, 32], "max_total_sequence_length": 32}
    policy = {"generation": {}, **rates, **sizes, "megatron_cfg": {"data_parallel_size": dp}}
    return Config.model_validate({"name": "t", "algorithm": algorithm, "data": {}, "policy": policy, "sft": sft})


def test_sft_before_grpo_has_its_own_rate() -> None:
    """The workers' schedule is GRPO's, and would be at its end before SFT is; without GRPO it is that of the whole run."""
    own, grpos = {"lr": 3e-3}, {"lr": 2e-4}
    for algorithm, sft, expected in (("grpo", own, own), ("sft", own, own), ("grpo", {}, grpos), ("sft", {}, {})):
        run = config_of_sft(algorithm, sft)
        assert learning_rate(run, RunPlan.of(run)) == expected


@pytest.mark.parametrize(("rows", "dp", "per_shard"), [(64, 16, 4), (64, 4, 16), (10, 1, 10), (33, 2, 17)])
def test_buckets_have_no_more_rows_than_needed(rows: int, dp: int, per_shard: int) -> None:
    """They may have fewer rows than a microbatch holds."""
    assert train_buckets(config_of_sft("sft", {}, dp), rows) == (Bucket(per_shard, 16), Bucket(per_shard, 32))


@pytest.mark.parametrize("may_stop", [False, True])
def test_a_stop_ends_a_validation(may_stop: bool) -> None:
    """After a step it returns nothing, so that the step is recorded; before the first step it ends the run."""
    rows = [Demonstration(np.array([1, 2]), np.ones(2, np.float32), "")] * 99
    stop = StopSignal()
    session: Any = MagicMock(config=config_of_sft("sft", {}), stop=stop)
    stop.requested = True
    with pytest.raises(StopRequestedError) if may_stop else nullcontext():
        assert evaluate(session, rows, may_stop=may_stop) == {}
    assert not session.replays.mock_calls


def test_a_position_in_other_demonstrations_is_an_error() -> None:
    """The number is equal; one token differs."""

    def rows(last: int) -> list[Demonstration]:
        mask = np.ones(3, np.float32)
        return [Demonstration(np.array([1, 2, token]), mask, "") for token in (3, 4, last)]

    position = open_sampler(rows(5), config_of_sft("sft", {}).data).state()
    inputs = SimpleNamespace(demonstrations=rows(6), validation_demonstrations=[])
    checkpoints = SimpleNamespace(state=TrainState(2, {"sft_sampler": position}))
    run = config_of_sft("sft", {})
    session: Any = SimpleNamespace(config=run, plan=RunPlan.of(run), inputs=inputs, checkpoints=checkpoints)
    with pytest.raises(CheckpointError, match="references or order of the examples differ"):
        train_sft(session)


def limited(demonstrations: int, prompts: int, sft: dict[str, Any], grpo: dict[str, Any]) -> Config:
    grpo = {"num_prompts_per_step": 4, **grpo}
    content = {"policy": {"train_global_batch_size": 8}, "sft": sft, "grpo": grpo, "data": {}}
    config = Config.model_validate({"name": "epochs", "algorithm": "grpo", **content})
    tokens = np.zeros(2, np.int64)
    rows = [Demonstration(tokens, tokens.astype(np.float32), "")] * demonstrations
    asked = [Prompt("", tokens, "", "")] * prompts
    inputs = Inputs(config, {}, None, {}, rows, [], asked, [])  # type: ignore[arg-type]
    return limit_steps(config, inputs)


@pytest.mark.parametrize(("epochs", "steps"), [(None, 20), (1, 4), (2, 7), (9, 20)])
def test_a_run_ends_at_the_first_limit(epochs: int | None, steps: int) -> None:
    limits = {"max_num_steps": 20, "max_num_epochs": epochs}
    config = limited(27, 13, limits, limits)
    assert (config.sft.max_num_steps, config.grpo.max_num_steps) == (steps, steps)  # 27 in eights, 13 in fours


def test_the_steps_of_an_epoch_draw_every_example() -> None:
    config = limited(27, 0, {"max_num_steps": 100, "max_num_epochs": 2}, {})
    sampler = Sampler({"": range(27)}, {"": 1.0}, seed=5)
    drawn = sampler.take(8 * config.sft.max_num_steps)
    assert min(drawn.count(example) for example in range(27)) == 2
    assert config.grpo.max_num_steps == 100  # without prompts nothing limits it


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"grad_norm": float("nan"), "masked_minibatches": 0.0}, "the gradient norm was nan"),
        ({"grad_norm": 0.0}, "the advantages are all zero"),
        ({"masked_minibatches": 2.0}, "the reward returned None or failed for every sample"),
    ],
)
def test_steps_that_change_no_weights_end_the_run(bad: dict[str, float], says: str) -> None:
    """After `limit` of them in a row, and at the end of a run that has no others."""
    good, counted = {"grad_norm": 0.5, "masked_minibatches": 1.0}, UpdateCount()
    for metrics in (bad, bad, good, {"critic/loss": 1.0}, bad, bad):
        counted.count(metrics, 3)
    counted.check_end()
    with pytest.raises(RunError, match=rf"the last 3 steps \(policy.optimizer.max_skipped_steps\) changed no.*{says}"):
        counted.count(bad, 3)
    counted.begin("grpo", 6)
    counted.count(bad, 3)
    with nullcontext() if bad == {"grad_norm": 0.0} else pytest.raises(RunError, match=f"none of its 1 grpo steps.*{says}"):
        counted.check_end()  # rewards may be equal for a while
    alone = UpdateCount(stage="sft")
    alone.check_end()
    alone.count(bad, 3)
    with pytest.raises(RunError, match=f"learned nothing: none of its 1 sft steps.*{says}"):
        alone.check_end()
