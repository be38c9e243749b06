"""Evaluates a model on held-out prompts: generates greedy and sampled completions, rewards them, and counts pass@k.

    report = evaluate(config, Evaluation(samples=8, ks=(1, 8)))
    report.rows["all"]["pass@8"]

Only generation workers start. They load `policy.model_name` themselves.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.config.roles import GENERATION
from dagrl.config.settings import burst_steps
from dagrl.data.media import MediaStore
from dagrl.data.tokenization import Prompt
from dagrl.errors import ConfigError
from dagrl.rl.benchmarks import rewards_of_sets
from dagrl.rl.functions.answers import Answers
from dagrl.rl.pass_at_k import gain, pass_at_k, with_interval
from dagrl.rl.rewards import RewardRunner, rewards_of
from dagrl.rl.rollout.episodes import RolloutGroup, Sample, new_group, request_seeds, samples_of
from dagrl.rl.rollout.rollouts import Rollouts
from dagrl.rl.rollout.scoring import ScoredGroup, check_groups, reward_texts, reward_values, scored_group, with_turn_rewards
from dagrl.rl.rollout.turns import Turns, open_turns
from dagrl.run.cluster import gpus_per_worker
from dagrl.run.engines import WorkerEngines
from dagrl.run.fleet import Fleet
from dagrl.run.plans import generate_plan, with_media
from dagrl.run.preflight import Inputs, preflight
from dagrl.run.replays import Replays
from dagrl.run.start import add_phases, load_phases, prepared_config, scheduler_options
from dagrl.run.stop import stop_on_signals
from dagrl.runtime.schedule import Scheduler
from dagrl.telemetry.progress import Progress
from dagrl.telemetry.record import RunPaths
from dagrl.telemetry.timing import PhaseClock

logger = logging.getLogger(__name__)

ALL = "all"
WAIT_S = 1.0
LOGGED = 10  # lines of progress
AT_ONCE = 4096  # completions that engines hold, running or waiting: each quantum reports them all


@dataclass(frozen=True)
class Evaluation:
    """The completions to measure: one greedy completion of each prompt if `greedy`, and `samples` sampled ones.

    A completion is right if its reward is at least `right_from`. Prompts are those of `evaluation.sets`, or else the
    held-out ones, with `train_split` those of training.
    """

    samples: int = 8
    ks: tuple[int, ...] = (1, 8)
    greedy: bool = True
    right_from: float = 1.0
    train_split: bool = False


@dataclass(frozen=True)
class Completion:
    """A rewarded completion. `reward` is None if the reward function or the environment failed."""

    sample: Sample
    greedy: bool
    reward: float | None


@dataclass(frozen=True)
class Report:
    """`rows[task]` has the metrics of a task, `rows["all"]` of everything; `completions[prompt]` what they come from."""

    rows: dict[str, dict[str, float]]
    completions: list[list[Completion]] = field(repr=False, default_factory=list)


def check_evaluation(config: Config, wanted: Evaluation) -> None:
    """Raises ConfigError for what cannot be evaluated."""
    if not RunPlan.of(config).generates:
        raise ConfigError("an evaluation generates and rewards completions; add algorithm=grpo and reward.function=...")
    if not wanted.samples and not wanted.greedy:
        raise ConfigError("nothing to generate: raise --samples, or leave --no-greedy out")
    wrong = [k for k in wanted.ks if not 1 <= k <= wanted.samples]
    if wrong and wanted.samples:
        raise ConfigError(f"pass@{wrong[0]}: expected a k of 1 to {wanted.samples}, the samples of each prompt (--samples)")


def evaluate(config: Config, wanted: Evaluation) -> Report:
    """Runs the evaluation. Raises a UserError, before any worker starts, for what can be checked by then."""
    check_evaluation(config, wanted)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="dagrl-")))
        progress = stack.enter_context(Progress(config.logger, Console(stderr=True)))
        stop = stack.enter_context(stop_on_signals(saves=False))
        stack.enter_context(stop.at_once())
        fleet = stack.enter_context(Fleet(roles=(GENERATION,)))
        progress.stage("Checking the evaluation")
        inputs = preflight(config, checkpoints=False, early=fleet)
        held_out = inputs.prompts if wanted.train_split else inputs.validation_prompts
        prompts = inputs.evaluation_prompts or held_out[: config.grpo.max_val_samples]
        if not prompts:
            raise ConfigError(
                "no held-out prompts; set data.val_path, data.val_split or data.val_fraction, or pass --train or --set gsm8k"
            )
        sets = config.evaluation.sets
        marks = rewards_of_sets(config.evaluation, config.reward.num_workers) if sets else config.reward
        config = prepared_config(inputs.config, inputs, directory / "init_model", fleet.apart)
        config = config.with_keys({"policy.router_replay": False})
        if config.data.images.enabled:
            config = config.with_keys({"output_dir": str(directory)})
            MediaStore(RunPaths.of(config).media, config.data.images).add(inputs.media)
        reward = stack.enter_context(RewardRunner(marks))
        turns = stack.enter_context(open_turns(config, inputs.tokenizer, inputs.processor))
        progress.stage("Starting Ray and generation workers")
        fleet.join(config)
        stop.listen()
        group = stack.enter_context(fleet.single_group(config, GENERATION))
        progress.stage("Warming up")
        scheduler = stack.enter_context(Scheduler([group], scheduler_options(config)))
        (plan,) = with_media(config, [generate_plan(config)])
        replays = Replays(load_phases(config, [plan]), scheduler, PhaseClock(), RunPlan.of(config).devices)
        add_phases(scheduler, replays.phases, [plan], inputs.tokenizer)
        scheduler.compile()
        scheduler.warmup()
        progress.stage("Generating")
        bursts = burst_steps(config, gpus=gpus_per_worker(config.cluster) > 0)
        engines = WorkerEngines(group, replays, config.timeouts.replay, burst_steps=bursts)
        rollouts = Rollouts(config, engines, turns, media=config.data.images.enabled)
        return _report(_complete(config, inputs, prompts, wanted, rollouts, turns, reward), wanted)


def _complete(
    config: Config,
    inputs: Inputs,
    prompts: Sequence[Prompt],
    wanted: Evaluation,
    rollouts: Rollouts,
    turns: Turns,
    reward: RewardRunner,
) -> list[list[Completion]]:
    """Generates and rewards all completions, by prompt."""
    scoring: list[tuple[RolloutGroup, list[Sample], Future[Answers]]] = []
    groups = []
    for number, prompt in enumerate(prompts):
        seeds = request_seeds(config.seed, number, wanted.samples + wanted.greedy)
        groups.append(new_group(config, number, number, prompt, seeds))
        for episode in groups[-1].episodes[: wanted.greedy]:
            episode.greedy = True
    started, ahead = 0, max(1, AT_ONCE // (wanted.samples + wanted.greedy))
    while started < len(groups) or rollouts.busy:
        if started < (end := min(len(scoring) + ahead, len(groups))):
            rollouts.start(*groups[started:end])
            started = end
        if not rollouts.generating and turns.awaited:
            wait(turns.awaited, WAIT_S, FIRST_COMPLETED)
        for group in rollouts.advance():
            samples = samples_of(inputs.tokenizer, group)
            row_values = partial(reward_values, group, samples, inputs.tokenizer)
            scoring.append((group, samples, reward.submit(*reward_texts(samples), row_values)))
            if len(scoring) % max(1, len(prompts) // LOGGED) == 0:
                logger.info("completed %d of %d prompts", len(scoring), len(prompts))
    scored = [
        scored_group(config, group, samples, with_turn_rewards(config, rewards_of(answers.result()), samples))
        for group, samples, answers in scoring
    ]
    return completions_of(config, scored, reward)


def completions_of(config: Config, groups: Sequence[ScoredGroup], reward: RewardRunner) -> list[list[Completion]]:
    """Returns the completions of each prompt. Raises RunError if too many of all failed."""
    check_groups(config, reward, groups, may_all_fail=True)
    return [
        [
            Completion(sample, sample.completion.greedy, float(value) if valid else None)
            for sample, value, valid in zip(group.samples, group.rewards.values, group.valid, strict=True)
        ]
        for group in sorted(groups, key=lambda group: group.group.number)
    ]


def _report(completions: list[list[Completion]], wanted: Evaluation) -> Report:
    tasks = dict.fromkeys(of_prompt[0].sample.prompt.task for of_prompt in completions)
    rows = {
        task: summary([of_prompt for of_prompt in completions if of_prompt[0].sample.prompt.task == task], wanted)
        for task in tasks
        if task
    }
    return Report({**rows, ALL: summary(completions, wanted)}, completions)


def against(first: Report, report: Report, wanted: Evaluation) -> Report:
    """Returns `report` with `greedy/gain` and `sampled/gain` over another model's report of the same prompts."""
    pairs = list(zip(first.completions, report.completions, strict=True))
    rows = {}
    for task, row in report.rows.items():
        chosen = [pair for pair in pairs if task in (ALL, pair[0][0].sample.prompt.task)]
        gains: dict[str, float] = {}
        for name, greedy in (("greedy", True), ("sampled", False)):
            if f"{name}/right" in row:
                before, after = (
                    [_mean([_is_right(one, wanted) for one in pair[side] if one.greedy is greedy]) for pair in chosen]
                    for side in (0, 1)
                )
                gains |= gain(f"{name}/gain", before, after)
        rows[task] = {**row, **gains}
    return Report(rows, report.completions)


def summary(completions: Sequence[Sequence[Completion]], wanted: Evaluation) -> dict[str, float]:
    """Returns the metrics of prompts. A completion without a reward counts as wrong, and not in mean rewards."""
    everything = [completion for of_prompt in completions for completion in of_prompt]
    metrics: dict[str, float] = {"prompts": float(len(completions))}
    for name, greedy in (("greedy", True), ("sampled", False)):
        chosen = [completion for completion in everything if completion.greedy is greedy]
        rewards = [completion.reward for completion in chosen if completion.reward is not None]
        if chosen:
            metrics[f"{name}/reward"] = _mean(rewards)
            right = _mean([float(_is_right(completion, wanted)) for completion in chosen])
            metrics |= with_interval(f"{name}/right", right, len(completions))  # the samples of a prompt are one trial
            metrics[f"{name}/tokens"] = _mean([float(len(completion.sample.completion.tokens)) for completion in chosen])
    if wanted.samples:
        counts = [
            sum(_is_right(completion, wanted) for completion in of_prompt if not completion.greedy)
            for of_prompt in completions
        ]
        for k in wanted.ks:
            share = _mean([pass_at_k(wanted.samples, right, k) for right in counts])
            metrics |= with_interval(f"pass@{k}", share, len(completions))
    failed = sum(completion.reward is None for completion in everything)
    return {**metrics, **({"failed": float(failed)} if failed else {})}


def _is_right(completion: Completion, wanted: Evaluation) -> bool:
    return completion.reward is not None and completion.reward >= wanted.right_from


def _mean(values: Sequence[Any]) -> float:
    return sum(values) / len(values) if values else 0.0
