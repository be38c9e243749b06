"""Where training batches come from: prompts are drawn, completed and scored here, and wait in the buffer of trajectories.

    experience = Experience(session, reward, max_age_steps=0)
    experience.fill()                 # start as many groups as their ages allow
    experience.work()                 # one quantum of generation, and whatever has been scored by then
    groups = experience.take()        # a batch for a training step, or None
    experience.advance(version)       # the step is done, and generation has its weights

The synchronous and the asynchronous loop differ in nothing but when they call these.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from dagrl.config import Json
from dagrl.data import Sampler
from dagrl.data.tokenization import Prompt, digest_of
from dagrl.environments import EnvironmentRunner
from dagrl.errors import RunError
from dagrl.function_runner import Answers, split_answered
from dagrl.loops.episodes import Episode, RolloutGroup, Sample, new_group, request_seeds, samples_of
from dagrl.loops.rollout import Rollouts
from dagrl.loops.scoring import FAILED, ZERO_VARIANCE, ScoredGroup, answered, mean_reward, scored_group, useless
from dagrl.loops.session import Session
from dagrl.loops.stop import StopRequestedError
from dagrl.loops.trajectories import TrajectoryBuffer
from dagrl.loops.trajectory_file import SavedGroup, can_go_on, read_trajectories, write_trajectories
from dagrl.rewards import RewardRunner, check_failures, join_rewards, rewards_of
from dagrl.telemetry.metrics import DROPPED, ENVIRONMENT_FAILURES, REWARD_MEAN, STALENESS, VALIDATION

logger = logging.getLogger(__name__)

VALIDATION_STREAM = 1 << 32
"""Numbers of validation groups start here; those of training groups count from 0."""

WAIT_S = 1.0  # between two looks at the stop signal while there is nothing to generate


@dataclass(frozen=True)
class NextBatch:
    """Groups of the next training batch; `others` are being generated or scored, and may yet be dropped."""

    scored: Sequence[ScoredGroup]
    others: Sequence[RolloutGroup] = ()

    def episodes(self) -> dict[tuple[int, int], Episode]:
        """All sequences, finished or not, by their group's number and their place in it."""
        groups = [*(group.group for group in self.scored), *self.others]
        return {(group.number, place): episode for group in groups for place, episode in enumerate(group.episodes)}


@dataclass
class _Scoring:
    group: RolloutGroup
    samples: list[Sample]
    answers: Future[Answers]


class Experience:
    """See the module's first lines. For one thread; use it as a context manager."""

    def __init__(self, session: Session, reward: RewardRunner, *, max_age_steps: int) -> None:
        config = session.config
        self._session = session
        self._reward = reward
        self._stack = ExitStack()
        self._first = config.sft.max_num_steps
        prompts = session.inputs.prompts
        self.sampler = Sampler(len(prompts), config.data.seed, config.data.shuffle, digest_of(prompts))
        self.buffer: TrajectoryBuffer[ScoredGroup] = TrajectoryBuffer(
            config.grpo.num_prompts_per_step, max_age_steps, version=session.step
        )
        self.rollouts = Rollouts(session, self._environment())
        self._scoring: list[_Scoring] = []
        self._validated: list[_Scoring] = []
        self._useless: list[ScoredGroup] = []  # dropped by dynamic sampling since the last batch was taken
        self._dropped_before: Counter[str] = Counter()  # by processes before this one, by reason

    def __enter__(self) -> Self:
        self._session.savers.append(self.save)
        if self._session.shared is not None:
            self._session.shared.before_sleep.append(self.withdraw)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # a checkpoint will be saved, and now rewards can still be asked for, and the environment can still answer
        with self._stack:
            if error is None or isinstance(error, StopRequestedError):
                self.rest()
                wait(self.rollouts.pending, self._session.config.environment.timeout_s)
                self.rest()
                self.rollouts.leave_questions()

    def fill(self) -> None:
        """Start the groups that may start now, and that the steps left will need."""
        left = self._first + self._session.config.grpo.max_num_steps - self._session.step
        counts = self.buffer.counts()
        needed = self.buffer.groups_per_step * left - counts.generating - counts.finished - counts.taken
        for _ in range(min(self.buffer.room(), needed)):
            number = self.buffer.start()
            (key,) = self.sampler.take(1)
            self._start(number, key)

    def work(self, other: Future[Any] | None = None) -> None:
        """One quantum of generation. With nothing to generate, wait for a score, an environment's answer, or `other`."""
        if self.rollouts.generating:
            self._sort(self.rollouts.advance())
        else:
            awaited: list[Future[Any]] = [*self.rollouts.pending, *([] if other is None else [other])]
            awaited += [item.answers for item in self._scoring]
            awaited += [item.answers for item in self._validated if not item.answers.done()]  # they stay until all are
            if not awaited and not self._validated:
                raise RunError(
                    f"no batch can come: nothing is generated, scored or answered; groups: {self.buffer.counts()}"
                )
            wait(awaited, WAIT_S, FIRST_COMPLETED)
            self._sort(self.rollouts.advance())
        self._take_scores()

    def take(self) -> list[ScoredGroup] | None:
        """A batch for the next training step, or None while there is none.

        Raises RunError when the reward function or the environment failed for too many samples of the batch and of what was
        dropped on the way to it, or dynamic sampling finds no groups to learn from.
        """
        taken = self.buffer.take()
        if taken is None:
            self._check_yield()
            return None
        groups = [group.payload for group in taken]
        self._check_failures([*self._useless, *groups])
        self._useless = []
        return groups

    def next_batch(self) -> NextBatch:
        """What there is by now of the groups that the next batch is certain to have, unless they are dropped."""
        wanted = self.buffer.next_batch()
        scored = [group.payload for group in self.buffer.finished() if group.number in wanted]
        others = [*(item.group for item in self._scoring), *self.rollouts.groups]
        return NextBatch(scored, [group for group in others if group.number in wanted])

    def advance(self, version: int) -> None:
        """The batch taken last was trained on, and generation has `version`."""
        too_old = self.buffer.advance(version)
        if too_old:
            self.rest()
            self.rollouts.abort(set(too_old) & self.rollouts.numbers)
            self._scoring = [item for item in self._scoring if item.group.number not in too_old]

    def rest(self) -> None:
        """Read the quanta in flight and start none."""
        self._sort(self.rollouts.settle())

    def withdraw(self) -> None:
        """`rest`, and leave no request in the engines, which are about to sleep: a stop may come while some run."""
        self._sort(self.rollouts.withdraw())

    def finish_running(self) -> None:
        """Generate until nothing runs, and start nothing new; where a stop is asked for, no longer than until then.

        It does not raise: the train workers have the weights of a step that is not recorded yet, whose end looks at the
        signal. What still runs begins anew when the run goes on, as its sequences may not have tokens of two versions.
        """
        while self.rollouts.busy and not self._session.stop.requested:
            self.work()

    def validate(self, *, may_stop: bool = False) -> dict[str, float]:
        """Mean reward on held-out prompts, one completion each, sampled as in training.

        `may_stop`: a stop ends it, as it may where every step that was taken is recorded. Raises RunError when the reward
        function or the environment failed for a larger share than it may.
        """
        prompts = self._session.inputs.validation_prompts
        if not prompts:
            return {}
        self._session.progress.status("validating")
        seeds = request_seeds(self._session.config.seed, VALIDATION_STREAM + self._session.step, len(prompts))
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            number = VALIDATION_STREAM + index
            self.rollouts.start(new_group(self._session, number, -1 - index, prompt, [seed], cohort=-1))
        while len(self._validated) < len(prompts) or not all(item.answers.done() for item in self._validated):
            if may_stop and self._session.stop.requested:
                self._give_up_validation()
                self._session.stop.check()
            self.work()
        scored, self._validated = sorted(self._validated, key=lambda item: item.group.number), []
        samples = [sample for item in scored for sample in item.samples]
        rewards = join_rewards([rewards_of(item.answers.result()) for item in scored])
        self._reward.check(rewards, may_all_fail=True)
        self._check_environment(samples, may_all_fail=True)
        return {
            VALIDATION + "reward": mean_reward(rewards, samples),
            VALIDATION + "reward_failures": float(rewards.failed),
            **self._environment_failures(samples, VALIDATION + ENVIRONMENT_FAILURES.replace("/", "_")),
        }

    def _give_up_validation(self) -> None:
        """What a checkpoint would not know."""
        self.rest()
        self.rollouts.abort({number for number in self.rollouts.numbers if number >= VALIDATION_STREAM})
        self._validated = []

    def metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """What the groups of a batch are like, how old they are for the step that trains on them, and what was dropped."""
        samples = [sample for group in groups for sample in group.samples]
        made = [np.array(sample.completion.versions)[np.array(sample.completion.sampled)] for sample in samples]
        ages = self.buffer.version - np.concatenate(made)
        lengths = [len(sample.completion.tokens) for sample in samples]
        rewards = join_rewards([group.rewards for group in groups])
        return {
            REWARD_MEAN: mean_reward(rewards, samples),
            "reward/failures": float(rewards.failed),
            **self._environment_failures(samples, ENVIRONMENT_FAILURES),
            "completion_tokens": float(np.mean(lengths)),
            "truncated_share": float(np.mean([sample.completion.finish_reason == "length" for sample in samples])),
            "turns": float(np.mean([sample.completion.turns for sample in samples])),
            STALENESS + "policy_age_mean": float(ages.mean()),
            STALENESS + "policy_age_max": float(ages.max()),
            **{DROPPED + reason: float(count) for reason, count in self._dropped().items()},
        }

    def state(self) -> dict[str, Json]:
        """Where the data stands, for the driver's state in a checkpoint."""
        return {
            "grpo_sampler": self.sampler.state(),
            "grpo_next_group": self.buffer.next_number,
            "grpo_dropped": dict(self._dropped()),
        }

    def restore(self, counters: Mapping[str, Json], directory: Path) -> None:
        """Go on from a checkpoint: the data's position, and the groups that were not yet trained on."""
        saved = read_trajectories(directory)
        position = saved.state if saved is not None else counters
        self.sampler.restore(cast("Mapping[str, Json]", position["grpo_sampler"]))
        self.buffer.next_number = cast(int, position["grpo_next_group"])
        self._dropped_before = Counter(cast("Mapping[str, int]", position["grpo_dropped"]))
        for group in () if saved is None else saved.groups:
            self._restart(group)
        self.rest()  # groups that came to their end as they were started: this run may have no environment any more
        self.advance(self._session.step)

    def save(self, directory: Path) -> None:
        """Write the groups not yet trained on, or their prompts alone (`grpo.async_grpo.on_checkpoint`)."""
        self._session.attend("generation")
        self.rest()
        whole = self._session.config.grpo.async_grpo.on_checkpoint == "save"
        groups = [group.payload.group for group in self.buffer.untrained()] + [item.group for item in self._scoring]
        groups += self.rollouts.snapshot()
        born = self.buffer.generating() | {group.number: group.version for group in self.buffer.untrained()}
        write_trajectories(
            directory,
            [SavedGroup(group, born[group.number], whole) for group in sorted(groups, key=lambda group: group.number)],
            self.state(),
        )

    def _environment(self) -> EnvironmentRunner | None:
        config = self._session.config.environment
        if config.function is None:
            return None
        return self._stack.enter_context(EnvironmentRunner(config, self._session.inputs.tokenizer))

    def _start(self, number: int, key: int) -> None:
        config = self._session.config
        seeds = request_seeds(config.seed, number, config.grpo.num_generations_per_prompt)
        prompt = self._session.inputs.prompts[key]
        self.rollouts.start(new_group(self._session, number, key, prompt, seeds, cohort=self.buffer.version))

    def _restart(self, saved: SavedGroup) -> None:
        """A group of the run before: from its tokens, or from its prompt with the present policy."""
        number, key = saved.group.number, saved.group.key
        prompt: Prompt = self._session.inputs.prompts[key]
        config, version = self._session.config, self._session.step
        seeds = [episode.seed for episode in saved.group.episodes]
        limits = [one.max_new_tokens for one in new_group(self._session, number, key, prompt, seeds).episodes]
        whole = saved.whole and can_go_on(config, version, prompt, saved.group, limits)
        self.buffer.restart(number, saved.version if whole else self._session.step)
        if not whole:
            self._start(number, key)
            return
        for episode, limit in zip(saved.group.episodes, limits, strict=True):
            episode.prompt, episode.max_new_tokens = prompt, limit
        if saved.group.complete:
            self._score(saved.group)
        else:
            self.rollouts.start(saved.group)

    def _sort(self, complete: Sequence[RolloutGroup]) -> None:
        for group in complete:
            self._score(group)

    def _score(self, group: RolloutGroup) -> None:
        samples = samples_of(self._session, group)
        scoring = self._validated if group.number >= VALIDATION_STREAM else self._scoring
        scoring.append(_Scoring(group, samples, self._reward.submit(*_texts(samples))))

    def _take_scores(self) -> None:
        done, self._scoring = split_answered(self._scoring, lambda item: item.answers)
        config = self._session.config
        for item in done:
            group = scored_group(config, item.group, item.samples, rewards_of(item.answers.result()))
            if config.grpo.use_dynamic_sampling and (reason := useless(group)):
                self._useless.append(group)
                self.buffer.drop(item.group.number, reason)
            else:
                self.buffer.finish(item.group.number, group)

    def _dropped(self) -> Counter[str]:
        """Groups given up since the run began, by reason."""
        return self._dropped_before + Counter(self.buffer.counts().dropped)

    def _check_failures(self, groups: Sequence[ScoredGroup]) -> None:
        self._reward.check(join_rewards([group.rewards for group in groups]))
        self._check_environment([sample for group in groups for sample in group.samples])

    def _check_environment(self, samples: Sequence[Sample], *, may_all_fail: bool = False) -> None:
        failures = [sample.completion.failure for sample in samples if not answered(sample)]
        limit, message = self._session.config.environment.max_failed_share, next(iter(failures), "")
        check_failures("environment", len(failures), len(samples), message, limit, may_all_fail=may_all_fail)

    def _environment_failures(self, samples: Sequence[Sample], name: str) -> dict[str, float]:
        """Samples that the environment failed for, as a metric; none where there is no environment."""
        if self._session.config.environment.function is None:
            return {}
        return {name: float(sum(not answered(sample) for sample in samples))}

    def _check_yield(self) -> None:
        """End a run whose groups are all dropped, rather than generate for ever."""
        config = self._session.config.grpo
        if len(self._useless) > config.dynamic_sampling_max_gen_batches * config.num_prompts_per_step:
            scored = [*self._useless, *(group.payload for group in self.buffer.finished())]
            self._check_failures(scored)
            reasons = Counter(useless(group) for group in self._useless)
            raise RunError(
                f"{len(self._useless)} of {len(scored)} groups generated for one step, of grpo.num_prompts_per_step = "
                f"{config.num_prompts_per_step}, were dropped: {reasons[ZERO_VARIANCE]} because their rewards are equal "
                "(the task is too hard or too easy, or its reward is wrong), "
                f"{reasons[FAILED]} because reward.function or environment.function failed for all of their samples but one "
                "at most. Mend what is at fault, raise grpo.dynamic_sampling_max_gen_batches, or set "
                "grpo.use_dynamic_sampling=false"
            )


def _texts(samples: Sequence[Sample]) -> tuple[list[str], list[str], list[str]]:
    """Prompts, completions and references."""
    return (
        [sample.prompt.text for sample in samples],
        [sample.text for sample in samples],
        [sample.prompt.reference for sample in samples],
    )
