"""Produces training batches: draws prompts, completes and scores them, and keeps them in the trajectory buffer.

experience = Experience(config, prompts, engines, reward, turns, stop, version=0)
groups = experience.next_batch()      # runs quanta of generation and takes scores, until a batch is complete
experience.work_until(training)       # goes on while it is trained on, as far as ages allow
experience.refit(version)             # after the step: generation gets its weights
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar, cast

import numpy as np

from dagrl.config import Config, Json
from dagrl.data import open_sampler
from dagrl.data.tokenization import Prompt
from dagrl.errors import RunError, WorkerError
from dagrl.rl.functions.answers import Answers, split_done
from dagrl.rl.pass_at_k import with_interval
from dagrl.rl.rewards import RewardRunner, join_rewards, rewards_of
from dagrl.rl.rollout.engines import GenerationEngines, PromptData, Stop
from dagrl.rl.rollout.episodes import RolloutGroup, Sample, new_group, request_seeds, samples_of
from dagrl.rl.rollout.rollouts import Rollouts
from dagrl.rl.rollout.scoring import (
    FAILED,
    TRAIN,
    ZERO_VARIANCE,
    ScoredGroup,
    Untrained,
    check_groups,
    drop_reason,
    equal_share,
    mean_reward,
    reward_means,
    reward_texts,
    reward_values,
    samples_in,
    scored_group,
    with_turn_rewards,
)
from dagrl.rl.rollout.turns import Turns
from dagrl.telemetry.metrics import (
    DROPPED,
    ENVIRONMENT_FAILURES,
    EQUAL_GROUPS,
    EVALUATION,
    REWARD,
    REWARD_MEAN,
    STALENESS,
    VALIDATION,
)

Payload = TypeVar("Payload")

logger = logging.getLogger(__name__)

VALIDATION_STREAM, EVALUATION_STREAM = 1 << 32, 1 << 33
"""The first number of a group of validation prompts, and of standard sets. Training groups count from 0."""

DECODED_GROUPS = 16  # groups decoded at once, in parallel

REWARD_WAIT, ENVIRONMENT_WAIT = "reward_wait", "environment_wait"
"""Phases of a step in which the driver waits for functions of the user, and nothing is generated."""

WAIT_S = 1.0  # between two checks of the stop signal while there is nothing to generate


def unmeasured(phase: str) -> AbstractContextManager[None]:
    """Counts no time."""
    return nullcontext()


@dataclass
class _Scoring:
    group: RolloutGroup
    samples: list[Sample]
    answers: Future[Answers]


class Experience:
    """See the module's docstring. Not thread-safe.

    `measure` counts the time in which nothing is generated, as a phase of the step.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptData,
        engines: GenerationEngines,
        reward: RewardRunner,
        turns: Turns,
        stop: Stop,
        *,
        version: int,
        marks: RewardRunner | None = None,
        measure: Callable[[str], AbstractContextManager[None]] = unmeasured,
    ) -> None:
        """`marks` has the rewards of `prompts.evaluation`, if there are any."""
        grpo, self._config, self._prompts, self._engines = config.grpo, config, prompts, engines
        self._reward, self._turns, self._stop, self._marks = reward, turns, stop, marks or reward
        self._measure = measure
        self._last = config.sft.max_num_steps + grpo.max_num_steps
        self.sampler = open_sampler(prompts.train, config.data)
        self.buffer = TrajectoryBuffer[ScoredGroup](
            grpo.num_prompts_per_step, grpo.async_grpo.max_age_steps, version=version
        )
        self.rollouts = Rollouts(config, engines, turns, media=prompts.media)
        self._scoring: list[_Scoring] = []
        self._validated: list[ScoredGroup] = []
        self._dropped_groups: list[ScoredGroup] = []  # by dynamic sampling, since the last batch was taken
        self._untrained: list[Untrained] = []  # since they were taken
        self._again = deque[tuple[int, int]]()  # number and prompt of groups that an earlier process has started
        self._dropped_before: Counter[str] = Counter()  # by earlier processes of the run, by reason

    def fill(self) -> None:
        """Starts the groups that may start now and that the remaining steps need."""
        left = self._last - self.buffer.version
        needed = self.buffer.groups_per_step * left - self.buffer.outstanding
        groups = []
        for _ in range(min(self.buffer.room(), needed)):
            if self._again:
                number, key = self._again.popleft()
                self.buffer.start(number)
            else:
                number, (key,) = self.buffer.start(), self.sampler.take(1)
            seeds = request_seeds(self._config.seed, number, self._config.grpo.num_generations_per_prompt)
            prompt, cohort = self._prompts.train[key], self.buffer.version
            groups.append(new_group(self._config, number, key, prompt, seeds, cohort))
        self.rollouts.start(*groups)

    def prepare(self, version: int) -> None:
        """Prepares the requests after those of the last batch, which is being trained to `version` while engines are idle.

        That batch counts as trained from then on. Agents do not begin: they would wait for the whole time.
        """
        if self._turns.can_wait and not self.rollouts.running:
            self.advance(version)
            self.fill()

    def begin(self) -> None:
        """Starts the next groups and their first quanta, so that engines work while the caller does something else."""
        self.fill()
        if not self._unfilled:
            self.rollouts.look_ahead()

    def work(self, other: Future[Any] | None = None) -> None:
        """Runs one quantum. With nothing to generate, waits for a score, an answer of the environment, or `other`.

        Without `other`, which is the training under way, engines that were replaced get their weights first.
        """
        while other is None and self._unfilled:
            self._update(self.buffer.version)
        if not self.rollouts.generating:
            turns, scores = list(self._turns.awaited), [item.answers for item in self._scoring]
            awaited: list[Future[Any]] = [*turns, *scores, *([] if other is None else [other])]
            assert awaited, f"no batch can become complete: {self.buffer.outstanding} groups, but nothing to wait for"
            needed = self.buffer.groups_per_step - len(self.buffer.finished())  # to go on, if none is dropped
            some = turns or other or len(scores) > needed or self._config.grpo.use_dynamic_sampling
            with nullcontext() if other else self._measure(ENVIRONMENT_WAIT if turns else REWARD_WAIT):
                wait(awaited, WAIT_S, FIRST_COMPLETED if some else ALL_COMPLETED)
        self._score(self.rollouts.advance())
        self._take_scores()

    def next_batch(self) -> list[ScoredGroup]:
        """Generates until a batch for a training step is complete. Raises StopRequestedError if a stop is requested.

        Raises RunError if the reward function or the environment failed for too many samples of the batch and of the groups
        dropped since the last one, or if dynamic sampling drops too many groups.
        """
        while (batch := self.buffer.take()) is None:
            self._check_yield()
            self._stop.check()
            self.fill()
            self.work()
        groups = [group.payload for group in batch]
        check_groups(self._config, self._reward, [*self._dropped_groups, *groups])
        self._dropped_groups = []
        return groups

    def work_until(self, update: Future[Any]) -> None:
        """Generates what later steps train on, until `update` is done."""
        while not update.done():
            self.fill()
            self.work(update)

    def refit(self, version: int) -> dict[str, float]:
        """Gives generation the train workers' weights as `version`, which marks the last taken batch as trained. Returns
        metrics. Engines that fail in it are replaced, and it is repeated.
        """
        while (metrics := self._update(version)) is None:
            pass
        self.advance(version)
        return metrics

    def advance(self, version: int) -> None:
        """Marks the last taken batch as trained; generation has `version`."""
        self.buffer.advance(version)

    def _update(self, version: int) -> dict[str, float] | None:
        """Updates the engines' weights between two quanta. Returns metrics; None if engines failed and are being replaced.

        Engines go on with the next quanta behind it, unless they exchange memory. Idle ones begin with its version: if it
        fails, what they made is dropped. Raises the failure if the run has to restart.
        """
        if not self.rollouts.serving:
            self.rest()  # replaces those that have failed since
        idle = not self.rollouts.running
        try:
            update = self._engines.update(version)
            if not (self._engines.moves or (idle and not self.rollouts.serving)):
                self.rollouts.look_ahead()
            metrics = update.result()
        except WorkerError as error:
            self._score(self.rollouts.replace(error, drop=idle))
            return None
        self.rollouts.serve()
        return metrics

    @property
    def _unfilled(self) -> bool:
        """Whether new engines wait for weights."""
        starting = not self._engines.ready and self.rollouts.generating
        return not self.rollouts.serving and not starting

    def rest(self) -> None:
        """Reads the quanta in flight and starts none."""
        self._score(self.rollouts.settle())

    def withdraw(self) -> None:
        """Calls `rest`, and takes all requests out of the engines, which are about to sleep."""
        self._score(self.rollouts.withdraw())

    def finish_running(self) -> None:
        """Generates until nothing runs, without starting new groups. A stop request ends it early.

        It does not raise on a stop: the train workers hold the weights of a step that is not recorded yet, and the end of
        that step checks the signal. The resumed run generates unfinished groups again, because their sequences must not have
        tokens of two versions.
        """
        while self.rollouts.busy and not self._stop.requested:
            self.work()

    def validate(self, *, may_stop: bool = False) -> dict[str, float]:
        """Returns the mean reward on held-out prompts, one completion each, sampled as in training.

        A stop request ends it: it then returns nothing, so that the step can be recorded without it. With `may_stop` it
        raises StopRequestedError instead; pass it only where every step taken is recorded. Raises RunError if the reward
        function or the environment failed for too large a share.
        """
        first = VALIDATION_STREAM
        scored = self._held_out(self._prompts.validation, first, first + self.buffer.version, may_stop=may_stop)
        if not scored:
            return {}
        self._untrained += map(Untrained, scored)
        rewards, samples = check_groups(self._config, self._reward, scored, may_all_fail=True)
        metrics = self._turns.metrics(samples)
        return {
            VALIDATION + "reward": mean_reward(rewards, samples),
            VALIDATION + "reward_failures": float(rewards.failed),
            **reward_means(rewards, samples, VALIDATION),
            **({VALIDATION + "environment_failures": metrics[ENVIRONMENT_FAILURES]} if metrics else {}),
        }

    def evaluate(self, *, may_stop: bool = False) -> dict[str, float]:
        """Returns the share of right greedy completions of each set of `evaluation.sets`, with its 95 % interval.

        A stop request ends it as it ends `validate`. Raises RunError if too large a share could not be marked.
        """
        first = EVALUATION_STREAM
        scored = self._held_out(self._prompts.evaluation, first, first, may_stop=may_stop)
        self._untrained += map(Untrained, scored)
        if scored:
            check_groups(self._config, self._marks, scored, may_all_fail=True)
        right: dict[str, list[bool]] = {}
        for group in scored:
            right.setdefault(group.samples[0].prompt.task, []).append(bool(group.valid[0] and group.rewards.values[0] >= 1))
        metrics: dict[str, float] = {}
        for task, answers in right.items():
            metrics |= with_interval(EVALUATION + task, sum(answers) / len(answers), len(answers))
        return metrics

    def _held_out(self, prompts: Sequence[Prompt], first: int, stream: int, *, may_stop: bool) -> list[ScoredGroup]:
        """Returns one scored completion of each prompt, in groups from number `first` on, with seeds of `stream`.

        Returns nothing if a stop is requested.
        """
        seeds = request_seeds(self._config.seed, stream, len(prompts))
        groups = [
            new_group(self._config, first + index, -1 - index, prompt, [seed], cohort=-1)
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        for group in groups:
            group.episodes[0].greedy = first == EVALUATION_STREAM
        self.rollouts.start(*groups)
        while len(self._validated) < len(prompts):
            if self._stop.requested:
                logger.warning("a validation was given up, as the run stops; its step has no validation metrics")
                self.rest()
                self.rollouts.abort({number for number in self.rollouts.numbers if number >= VALIDATION_STREAM})
                self._scoring = [item for item in self._scoring if item.group.number < VALIDATION_STREAM]
                self._validated = []
                if may_stop:
                    self._stop.check()
                return []
            self.work()
        scored, self._validated = sorted(self._validated, key=lambda group: group.group.number), []
        return scored

    def take_untrained(self) -> list[Untrained]:
        """Returns the validation samples and dropped groups since the last call."""
        untrained, self._untrained = self._untrained, []
        return untrained

    def metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Returns metrics of a batch: rewards, lengths, ages in the step that trains on it, and dropped groups."""
        samples = samples_in(groups)
        ages = self.buffer.version - np.concatenate([row.versions[row.sampled] for sample in samples for row in sample.rows])
        lengths = [len(sample.completion.tokens) for sample in samples]
        rewards = join_rewards([group.rewards for group in groups])
        return {
            REWARD_MEAN: mean_reward(rewards, samples),
            "reward/failures": float(rewards.failed),
            "reward/excluded": float(rewards.excluded),
            **reward_means(rewards, samples, REWARD),
            **({EQUAL_GROUPS: equal_share(groups)} if self._config.grpo.num_generations_per_prompt > 1 else {}),
            **self._turns.metrics(samples),
            "completion_tokens": float(np.mean(lengths)),
            "truncated_share": float(np.mean([sample.completion.finish_reason == "length" for sample in samples])),
            "turns": float(np.mean([sample.completion.turns for sample in samples])),
            STALENESS + "policy_age_mean": float(ages.mean()) if len(ages) else 0.0,  # an agent's may all be untrained
            STALENESS + "policy_age_max": float(ages.max(initial=0)),
            **{DROPPED + reason: float(count) for reason, count in self._dropped().items()},
        }

    def state(self) -> dict[str, Json]:
        """Returns the data position, for the driver's state in a checkpoint: also the number and the prompt of each group
        that is started and not trained on, which a resumed run generates again."""
        groups = [*self.rollouts.groups, *(item.group for item in self._scoring)]
        groups += [group.payload.group for group in self.buffer.finished()]
        untrained = sorted([*self._again, *((group.number, group.key) for group in groups)])
        return {
            "grpo_sampler": self.sampler.state(),
            "grpo_next_group": self.buffer.next_number,
            "grpo_untrained": [[*pair] for pair in untrained],
            "grpo_dropped": dict(self._dropped()),
        }

    def restore(self, counters: Mapping[str, Json]) -> None:
        """Restores the data position of a checkpoint. Its untrained groups start again, before others."""
        self.sampler.restore(counters["grpo_sampler"])
        self.buffer.next_number = cast(int, counters["grpo_next_group"])
        self._dropped_before = Counter(cast("Mapping[str, int]", counters["grpo_dropped"]))
        self._again.extend((number, key) for number, key in cast("list[list[int]]", counters["grpo_untrained"]))

    def _score(self, complete: Sequence[RolloutGroup]) -> None:
        """Sends groups to the reward functions, which work on the first while later ones are decoded."""
        for start in range(0, len(complete), DECODED_GROUPS):
            decoded = complete[start : start + DECODED_GROUPS]
            left = iter(samples_of(self._prompts.tokenizer, *decoded))
            for group in decoded:
                samples = list(islice(left, len(group.episodes)))
                values = partial(reward_values, group, samples, self._prompts.tokenizer)
                reward = self._marks if group.number >= EVALUATION_STREAM else self._reward
                self._scoring.append(_Scoring(group, samples, reward.submit(*reward_texts(samples), values)))

    def _take_scores(self) -> None:
        done, self._scoring = split_done(self._scoring, lambda item: item.answers)
        for item in done:
            rewards = rewards_of(item.answers.result())
            if self._config.environment.enabled:
                rewards = with_turn_rewards(self._config, rewards, item.samples)
            group = scored_group(self._config, item.group, item.samples, rewards)
            if item.group.number >= VALIDATION_STREAM:
                self._validated.append(group)
            elif self._config.grpo.use_dynamic_sampling and (reason := drop_reason(group)):
                self._dropped_groups.append(group)
                self._untrained.append(Untrained(group, TRAIN, reason))
                self.buffer.drop(item.group.number, reason)
            else:
                self.buffer.finish(item.group.number, group)

    def _dropped(self) -> Counter[str]:
        """Groups dropped since the run began, by reason."""
        return self._dropped_before + self.buffer.dropped

    def _check_yield(self) -> None:
        """Raises RunError if dynamic sampling drops too many groups, which would make the step endless."""
        config = self._config.grpo
        if len(self._dropped_groups) > config.dynamic_sampling_max_gen_batches * config.num_prompts_per_step:
            scored = [*self._dropped_groups, *(group.payload for group in self.buffer.finished())]
            check_groups(self._config, self._reward, scored)
            reasons = Counter(drop_reason(group) for group in self._dropped_groups)
            raise RunError(
                f"{len(self._dropped_groups)} of {len(scored)} groups generated for one step, of grpo.num_prompts_per_step "
                f"= {config.num_prompts_per_step}, were dropped: {reasons[ZERO_VARIANCE]} because their rewards are equal "
                "(the task is too hard or too easy, or its reward is wrong), "
                f"{reasons[FAILED]} because the reward or the environment failed for all of their samples but one "
                "at most. Fix the cause, raise grpo.dynamic_sampling_max_gen_batches, or set "
                "grpo.use_dynamic_sampling=false"
            )


@dataclass(frozen=True)
class FinishedGroup(Generic[Payload]):
    """A finished group in a training batch. `version` is the version it was started with."""

    number: int
    version: int
    payload: Payload


class TrajectoryBuffer(Generic[Payload]):
    """Bounds how many policy versions old a group of trajectories becomes. Independent of tokens, rewards and Ray. Not
    thread-safe.

        buffer = TrajectoryBuffer(groups_per_step=16, max_age_steps=1)
        number = buffer.start()                      # while buffer.room(): starts a group
        buffer.finish(number, payload)               # or buffer.drop(number, "zero_variance")
        groups = buffer.take()                       # a whole batch, or None if too few groups are finished
        buffer.advance(version)                      # after the step on it, when generation has the new weights

    A group is one prompt with all its generations. Its age in a training step is the version of the trained policy minus the
    version the group was started with, so no token in it is older.

    The buffer limits what starts; it does not discard work. A step trains on `groups_per_step` groups. A group that starts
    at version v, with a maximum age of A, must be among the next `groups_per_step * (A + 1)` groups trained, and `room`
    admits no more. `take` returns the oldest finished groups, but only if every other group can still be trained in time. It
    waits for a slow group whose last step has come. At A = 0 this is the synchronous order.
    """

    def __init__(self, groups_per_step: int, max_age_steps: int, *, version: int = 0) -> None:
        assert groups_per_step > 0 and max_age_steps >= 0
        self.groups_per_step = groups_per_step
        self.max_age_steps = max_age_steps
        self.version = version
        self.next_number = 0
        self._generating: dict[int, int] = {}  # number -> version it was started with
        self._finished: dict[int, FinishedGroup[Payload]] = {}
        self._taken: tuple[FinishedGroup[Payload], ...] = ()
        self.dropped: Counter[str] = Counter()  # in this process, by reason

    def room(self) -> int:
        """Returns how many groups may start now."""
        return max(0, self.groups_per_step * (self.max_age_steps + 1) - self.outstanding)

    def start(self, again: int | None = None) -> int:
        """Starts a group with the current version and returns its number: `next_number`, or `again` that of an earlier
        process, which a resumed run starts again. Such a run sets `next_number` first."""
        assert self.room() > 0, "start() without room(): the group could become too old"
        number = self.next_number if again is None else again
        self.next_number = max(self.next_number, number + 1)
        self._generating[number] = self.version
        return number

    def finish(self, number: int, payload: Payload) -> None:
        """Marks a group as generated and scored."""
        self._finished[number] = FinishedGroup(number, self._generating.pop(number), payload)

    def drop(self, number: int, reason: str) -> None:
        """Drops a group that is not taken yet, counts it under `reason`, and frees its room."""
        if self._generating.pop(number, None) is None:
            del self._finished[number]
        self.dropped[reason] += 1

    def take(self) -> list[FinishedGroup[Payload]] | None:
        """Returns the next batch by number; None if too few groups are finished, or if taking it would make others late."""
        assert not self._taken, "take() before advance(): the batch taken last is still being trained on"
        if len(self._finished) < self.groups_per_step:
            return None
        oldest = sorted(self._finished.values(), key=lambda group: (group.version, group.number))[: self.groups_per_step]
        if self._makes_others_late(oldest):
            return None
        for group in oldest:
            del self._finished[group.number]
        self._taken = tuple(sorted(oldest, key=lambda group: group.number))
        return list(self._taken)

    def advance(self, version: int) -> None:
        """Marks the last taken batch as trained. Groups that start from now on have `version`."""
        assert self.version <= version <= self.version + 1
        self._taken = ()
        self.version = version

    @property
    def outstanding(self) -> int:
        """Groups that are started and neither trained on nor dropped."""
        return len(self._generating) + len(self._finished) + len(self._taken)

    def finished(self) -> list[FinishedGroup[Payload]]:
        """Returns the finished groups that are not taken, by number."""
        return sorted(self._finished.values(), key=lambda group: group.number)

    def _makes_others_late(self, batch: Sequence[FinishedGroup[Payload]]) -> bool:
        """Returns whether, after `batch`, more groups are due by some step than training takes until then."""
        numbers = {group.number for group in batch}
        started = self._generating | {number: group.version for number, group in self._finished.items()}
        others = [version for number, version in started.items() if number not in numbers]
        due = Counter(version + self.max_age_steps for version in others)
        waiting = 0
        for step in sorted(due):
            waiting += due[step]
            if waiting > self.groups_per_step * (step - self.version):
                return True
        return False
