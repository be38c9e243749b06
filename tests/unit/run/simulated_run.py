"""A session without workers, for tests of the loops: durations are random, and every token can be checked.

Engines, training, rewards and the environment run in ticks of a clock that advances only when the loop waits. An engine step
makes one token of each running request. Its log-probability tells which policy version made it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, Future
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.config.settings import generation_config
from dagrl.data.tokenization import Prompt
from dagrl.errors import PhaseError, StopRequestedError, WorkerFailure
from dagrl.rl.environments import FAILED, Question, Reply
from dagrl.rl.functions.answers import Failed
from dagrl.rl.generation import FinishedRequest, RequestProgress, pack_generated, quantum_steps
from dagrl.rl.rewards import Rewards, SampleReward, check_failures
from dagrl.rl.rollout import experience
from dagrl.rl.rollout.engines import PromptData
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.rl.rollout.turns import EnvironmentTurns
from dagrl.run.checkpoint_store import Checkpoint, TrainState
from dagrl.run.engines import WorkerEngines
from dagrl.run.loops.grpo import train_grpo
from dagrl.run.loops.policy_update import Learned
from dagrl.run.model import character_tokenizer
from dagrl.run.replays import CountedReplay, ReplayTimes
from dagrl.run.session import Session, Stage
from dagrl.runtime.deadline import Deadline
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.replay import ReplayTiming
from dagrl.runtime.shapes import Batch

TOKENS = 16
UNANSWERED = "?"
"""A prompt whose samples get no rewards."""


class World:
    """The clock, and the futures that complete as time passes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  # not cryptography
        self._sudden = random.Random(seed)  # noqa: S311
        self.now, self._idle = 0, 0
        self._due: list[tuple[int, Future[Any], Callable[[], Any]]] = []

    def later(self, most: int, make: Callable[[], Any]) -> Future[Any]:
        """Returns a future that completes within `most` ticks, or just after a caller found it incomplete."""
        future = Sudden()
        future.world = self
        self._due.append((self.now + self.random.randint(0, most), future, make))
        return future

    def tick(self) -> None:
        self.now += 1
        self._end(lambda due, _: due <= self.now)

    def end_early(self, future: Future[Any]) -> None:
        """Completes the future early, in one of ten calls."""
        if self._sudden.random() < 0.1:
            self._end(lambda _, one: one is future)

    def _end(self, which: Callable[[int, Future[Any]], bool]) -> None:
        for item in [item for item in self._due if which(*item[:2])]:
            self._due.remove(item)
            try:
                item[1].set_result(item[2]())
            except StopRequestedError as error:
                item[1].set_exception(error)

    def wait(self, futures: Sequence[Future[Any]], timeout: float, return_when: str = ALL_COMPLETED) -> None:
        """Replaces `concurrent.futures.wait`. A wait for all futures times out in half of the cases."""
        if return_when == ALL_COMPLETED and self.random.random() < 0.5:
            return
        self._idle = 0 if futures else self._idle + 1
        assert self._idle < 3, "the loop spins without waiting"
        enough = all if return_when == ALL_COMPLETED else any
        while futures and not enough(map(Future.done, futures)):  # without completing futures early
            assert self._due, "nothing is in flight"
            self.tick()


class Sudden(Future[Any]):
    """May complete just after it was found incomplete, like a future completed by another thread."""

    world: World

    def done(self) -> bool:
        found = super().done()
        if not found:
            self.world.end_early(self)
        return found


class Parts(list[Any]):
    """The results of a replay, of these shards; None of one whose engine is dead."""

    def __init__(self, results: Mapping[int, Any]) -> None:
        super().__init__(results.values())
        self.shards = list(results)

    def partial(self) -> dict[int, Any]:
        return {shard: part for shard, part in zip(self.shards, self, strict=True) if part is not None}


class Engines:
    """The generation group: shards of `max_num_seqs` running requests each, at one policy version.

    An engine dies in a quantum, a refit or a call with the probability `dying`. A new one is absent until `connect`, and has
    no weights until a refit.
    """

    def __init__(self, config: Config, dying: float = 0.0, seed: int = 0) -> None:
        self.dying, self._random = dying, random.Random(seed)  # noqa: S311
        self.dead: set[int] = set()
        self.absent: set[int] = set()  # starting
        self.empty: set[int] = set()  # without weights
        generation = generation_config(config)
        vllm, self.timed = generation.vllm_cfg, generation.quantum_engine_steps is None
        self.layout, self.role = ParallelLayout(dp=vllm.data_parallel_size), SimpleNamespace(name="generation")
        self.slots, self.version = vllm.max_num_seqs, 0
        self.requests: list[dict[int, dict[str, Any]]] = [{} for _ in range(self.layout.dp)]

    def generate(self, batch: Batch, rows: Sequence[npt.NDArray[np.intp]]) -> Parts:
        assert ("seconds" in batch.scalars) == self.timed, "quanta of a fixed number of steps have no time limit"
        for shard, mine in zip(self.requests, rows, strict=True):
            for row in mine.tolist():
                names = ("request_ids", "seeds", "max_new_tokens", "lengths")
                number, seed, limit, length = (int(batch[name][row]) for name in names)
                assert limit > 0 and length > 0 and number not in shard
                drawn = random.Random(seed)  # noqa: S311
                shard[number] = {"made": [], "drawn": drawn, "ends": drawn.randint(1, 2 * limit), "limit": limit}
        assert not any(self.requests[shard] for shard in self.empty), "requests for an engine without weights"
        present = self._present()
        steps = [quantum_steps(batch, number) for number in range(len(self.requests))]
        made = {number: self._quantum(self.requests[number], steps[number]) for number in present if number not in self.dead}
        return Parts({number: made.get(number) for number in present})

    def refit(self, version: int) -> Parts:
        """Gives all engines that live the weights of a version."""
        assert not self.absent
        present = self._present()
        if not self.dead:
            self.version, self.empty = version, set()
        return Parts({shard: None if shard in self.dead else [] for shard in present})

    def _present(self) -> list[int]:
        """Returns the shards that run a replay, some of which die in it."""
        present = self._living()
        assert present, "the phase has no graph"
        self.dead |= {shard for shard in present if self._random.random() < self.dying}
        return present

    def _living(self) -> list[int]:
        return [shard for shard in range(len(self.requests)) if shard not in self.absent]

    def failure(self, phase: str) -> PhaseError:
        """Returns the error that a replay raises if an engine is dead."""
        rank = min(self.dead)
        return PhaseError((WorkerFailure("generation", rank, "", "", 0, phase, 0, "", "died", "", ""),))

    def replace(self, error: PhaseError) -> set[int]:
        """Makes new engines, for `EngineReplacement`."""
        assert error.failures and self.dead
        replaced, self.dead = self.dead, set()
        for shard in replaced:
            self.requests[shard] = {}
        self.empty |= replaced
        self.absent |= replaced
        return replaced

    @property
    def ready(self) -> bool:
        return self._random.random() < 0.3

    def connect(self) -> None:
        assert not (self.absent and self.dead)
        self.absent.clear()

    def _quantum(self, shard: dict[int, dict[str, Any]], steps: int) -> Any:
        finished = []
        for _ in range(steps):
            for number in list(shard)[: self.slots]:
                request = shard[number]
                request["made"].append((request["drawn"].randrange(4, TOKENS), self.version))
                if len(request["made"]) >= min(request["ends"], request["limit"]):
                    reason = "stop" if request["ends"] <= request["limit"] else "length"
                    finished.append(self._made(number, shard.pop(number), reason))
        return pack_generated(finished, map(RequestProgress, shard), steps)

    def call(self, method: str, numbers: Sequence[int] = (), *, deadline: Deadline) -> Any:
        assert deadline.key == "timeouts.replay_s", "not the start timeout"
        assert not self.dead, "it would not answer"
        assert method == "abort_requests"
        self.dead |= {shard for shard in self._living() if self._random.random() < self.dying}
        if self.dead:
            raise self.failure("")
        return [[shard.pop(number, None) for number in numbers] for shard in self.requests]

    @staticmethod
    def _made(number: int, request: dict[str, Any], reason: str) -> FinishedRequest:
        tokens, versions = ([item[at] for item in request["made"]] for at in (0, 1))
        return FinishedRequest(number, tokens, [logprob_of(version) for version in versions], versions, reason)


def logprob_of(version: int) -> float:
    return -1.0 - version


class Reward:
    """Scores after a while. Some groups get equal rewards, some samples none."""

    def __init__(self, world: World, max_failed_share: float) -> None:
        self._world, self._max_failed_share, self.closed = world, max_failed_share, False
        self.asked: list[tuple[str, ...]] = []  # completions by call
        self.answers: list[Sequence[float | Failed]] = []  # answers by call
        self.checked: list[int] = []  # samples of each check of a training step

    def submit(self, prompts: Sequence[str], completions: Sequence[str], *_: object) -> Future[Any]:
        assert not self.closed, "the reward processes have ended"
        self.asked.append(tuple(completions))
        most = 60 if self._world.random.random() < 0.1 else 3  # some scores are late
        return self._world.later(most, lambda: self._score_all(prompts, completions))

    def _score_all(self, prompts: Sequence[str], completions: Sequence[str]) -> Sequence[SampleReward | Failed]:
        self.answers.append([self._score(*pair) for pair in zip(prompts, completions, strict=True)])
        return [answer if isinstance(answer, Failed) else SampleReward(answer) for answer in self.answers[-1]]

    def check(self, rewards: Rewards, *, may_all_fail: bool = False) -> None:
        total, limit = len(rewards.values), self._max_failed_share
        self.checked += [] if may_all_fail else [total]
        check_failures("reward", rewards.failed, total, rewards.message, limit, may_all_fail=may_all_fail)

    def check_parts(self, rewards: Rewards) -> None:
        """Does nothing: there are no weights."""

    @staticmethod
    def _score(prompt: str, text: str) -> float | Failed:
        if text.endswith("9") or prompt == UNANSWERED:
            return Failed("no nines")
        return 0.5 if prompt.startswith("3") else float(len(text))


class Environment:
    """Answers `00` to every other completion after a while. Calls open when it closes fail."""

    max_turns, workers, opens = 3, 2, True

    def __init__(self, world: World) -> None:
        self._world, self._closed = world, False

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True

    def submit(self, worker: int, questions: Sequence[Question]) -> Future[list[Reply]]:
        return self._world.later(4, lambda: [self._answer(question) for question in questions])

    def close(self, key: str) -> None:
        """Does nothing: it keeps no state."""

    def _answer(self, question: Question) -> Reply:
        if self._closed:
            return Reply(None, FAILED, "the process that runs it ended")
        if not question.turns:  # of `reset`
            return Reply(None, prompt=question.prompt)
        return Reply("00" if len(question.turns[-1]) % 2 else None)


class Stop:
    """The stop signal of a run. It counts how often it is checked."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def requested(self) -> bool:
        return self._run.look()

    def check(self) -> None:
        if self.requested:
            raise StopRequestedError


class Trainer:
    """Replaces `PolicyTrainer`; forwards to the run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def start(self) -> None:
        """Does nothing."""

    def begin(self, groups: Sequence[ScoredGroup], step: int) -> Any:
        assert step == self._run.session.step + 1
        self._run.session.stop.check()
        return SimpleNamespace(result=lambda: self._run.train_on(groups, step))

    def submit(self, groups: Sequence[ScoredGroup], step: int) -> Future[Learned]:
        return self._run.world.later(12, lambda: self.begin(groups, step).result())


class Run:
    """One process of a run. `trained` are the batches by step, `metrics` those recorded.

    `stop_at`: the check of the stop signal, counted after the first step, that finds a stop requested.
    """

    def __init__(
        self, config: Config, seed: int, *, stop_at: int | None = None, resumed: Checkpoint | None = None, dying: float = 0.0
    ) -> None:
        self.config, self.world, self.engines = config, World(seed), Engines(config, dying, seed)
        self.trained: dict[int, list[ScoredGroup]] = {}
        self.metrics: list[dict[str, float]] = []
        self.replays: list[tuple[str, bool]] = []  # what was submitted (True) and read, in order
        self.experience: Any = None
        self.stop_at, self._checks = stop_at, 0
        tokenizer = character_tokenizer("0123456789+=")
        prompts = [Prompt(f"{n}=", np.array([4 + n % 10, 5]), str(n), f"row {n}") for n in range(9)]
        progress = SimpleNamespace(step=lambda *words, **keys: None, status=lambda text: None)
        self.checkpoints = SimpleNamespace(
            resumed_in=lambda counter: resumed if resumed and counter in resumed.state.counters else None,
            add_counters=self._add_counters,
            state=resumed.state if resumed else TrainState(0),
            parts=[],
            finish_step=self._take_state,
            due=lambda state: False,
        )
        asked = {"prompts": prompts, "validation_prompts": prompts[:2], "evaluation_prompts": []}
        self.inputs = SimpleNamespace(**asked, tokenizer=tokenizer)
        self.simulated = SimpleNamespace(  # replaces `Replays`; forwards to the run, whose methods tests replace
            shared=None,
            times=ReplayTimes(),
            hold=lambda *roles, **keys: None,
            submit=lambda name, value, rows=(): self.submit(name, value, rows),
            collect=lambda name, replay, busy_s=None: self.collect(name, replay, busy_s),
            replay=lambda name, value, rows=None: self.replay(name, value, rows),
            close_step=lambda tokens: {},
        )
        recorder = SimpleNamespace(
            progress=progress,
            step=self._record,
            record=SimpleNamespace(log=self.log),
            rollouts=None,
            keep_untrained=lambda untrained, step: None,
        )
        parts: dict[str, Any] = {
            "train": SimpleNamespace(call=lambda method, *, deadline: None),
            "generation": self.engines,
            "replays": self.simulated,
            "recorder": recorder,
            "checkpoints": self.checkpoints,
            "stop": Stop(self),
        }
        self.session = Session(config=config, plan=RunPlan.of(config), inputs=cast(Any, self.inputs), **parts)

    def train(self) -> TrainState | None:
        """Runs all steps. Returns the state of the checkpoint if the run was stopped."""
        inputs, stage = self.inputs, Stage.of("grpo", self.config.grpo, after=self.config.sft.max_num_steps)
        self.reward = reward = Reward(self.world, self.config.reward.max_failed_share)
        self.marks = Reward(self.world, 1.0)
        prompts = PromptData(inputs.prompts, inputs.validation_prompts, inputs.tokenizer, inputs.evaluation_prompts)
        engines = engines_of(self, replacement=self.engines)
        environment: Any = Environment(self.world) if self.config.environment.enabled else nullcontext()
        try:
            with patch.object(experience, "wait", self.world.wait), environment as entered:
                turns = EnvironmentTurns(self.config, inputs.tokenizer, entered)
                parts: Any = self.config, prompts, engines, reward, turns, Stop(self)
                self.experience = Experience(*parts, version=self.session.step, marks=cast(Any, self.marks))
                train_grpo(self.session, stage, self.experience, cast(Any, Trainer(self)))
        except StopRequestedError:
            return self.session.checkpoints.state
        finally:
            reward.closed = True
        return None

    def train_on(self, groups: Sequence[ScoredGroup], step: int) -> Learned:
        self.trained[step] = list(groups)
        return {"trained_tokens": 1.0}, 0.0

    def look(self) -> bool:
        self._checks += self.session.step > 0
        return self.stop_at is not None and self._checks >= self.stop_at

    def submit(self, name: str, value: Any, rows: Sequence[npt.NDArray[np.intp]] = ()) -> Any:
        """Runs the phase at once, in the order of submission."""
        self.replays.append((name, True))
        if name == "generate":
            return self.engines.generate(value, rows)
        assert name == "refit"
        return self.engines.refit(value)

    def collect(self, name: str, results: Any, busy_s: Any = None) -> tuple[Any, CountedReplay]:
        self.replays.append((name, False))
        if name == "generate":
            self.world.tick()
        if None in results:
            raise self.engines.failure(name)
        results = results if name == "generate" else []
        return results, CountedReplay(name, ("generation",), ReplayTiming(0.0, 1.0, (1.0,) * len(results), None), 1.0, 0.0)

    def replay(self, name: str, value: Any, rows: Any = None) -> Any:
        """Replays a refit. Raises otherwise: tests that replay training phases override it."""
        if name == "refit":
            return self.collect(name, self.submit(name, value))[0]
        raise AssertionError(f"{name} is not simulated")

    def log(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        """Receives the validation before the first step."""

    def _record(self, stage: str, step: int, position: int, total: int, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)

    def _add_counters(self, counters: Mapping[str, Any]) -> None:
        self.checkpoints.state = replace(self.checkpoints.state, counters={**self.checkpoints.state.counters, **counters})

    def _take_state(self, state: TrainState) -> None:
        self.checkpoints.state = state


def engines_of(run: Run, replacement: Any = None) -> WorkerEngines:
    """Returns the engines of a run as its loop sees them."""
    return WorkerEngines(cast(Any, run.engines), cast(Any, run.simulated), run.config.timeouts.replay, replacement)
