"""A session without workers, for tests of the loops: every duration is drawn, and the truth of every token is known.

Engines, training, rewards and the environment are simulated in ticks of a clock that moves only when the loop waits. One
engine step makes a token of each running request; its log-probability says which policy version made it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, Future
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from dagrl.checkpoint import Checkpoint, TrainState
from dagrl.config import Config
from dagrl.config.settings import generation_config
from dagrl.data.tokenization import Prompt
from dagrl.deadline import Deadline
from dagrl.environments import FAILED, Reply
from dagrl.function_runner import Failed
from dagrl.generation import FinishedRequest, Progress, pack_generated, steps_of_shard
from dagrl.layout import ParallelLayout
from dagrl.loops import async_grpo, experience, grpo
from dagrl.loops.replay_times import Counted
from dagrl.loops.scoring import ScoredGroup
from dagrl.loops.stop import StopRequestedError
from dagrl.model_init import character_tokenizer
from dagrl.replay import ReplayTiming
from dagrl.rewards import Rewards, check_failures
from dagrl.shapes import Batch

TOKENS = 16
UNANSWERED = "?"
"""A prompt whose samples have no rewards."""


class World:
    """The clock, and everything that takes time: `draw(most)` is a duration in ticks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  # not cryptography
        self._sudden = random.Random(seed)  # noqa: S311
        self.now, self._idle = 0, 0
        self._due: list[tuple[int, Future[Any], Callable[[], Any]]] = []

    def later(self, most: int, make: Callable[[], Any]) -> Future[Any]:
        """A future whose result is made when its time has come, or a moment after somebody looked whether it is there."""
        future = Sudden(self)
        self._due.append((self.now + self.random.randint(0, most), future, make))
        return future

    def tick(self) -> None:
        """Time passes."""
        self.now += 1
        for item in [item for item in self._due if item[0] <= self.now]:
            self._end(item)

    def end_early(self, future: Future[Any]) -> None:
        """Now and then, end what a future stands for before its time."""
        if self._sudden.random() < 0.1:
            for item in [item for item in self._due if item[1] is future]:
                self._end(item)

    def _end(self, item: tuple[int, Future[Any], Callable[[], Any]]) -> None:
        self._due.remove(item)
        try:
            item[1].set_result(item[2]())
        except StopRequestedError as error:
            item[1].set_exception(error)

    def wait(self, futures: Sequence[Future[Any]], timeout: float, return_when: str = ALL_COMPLETED) -> None:
        """In place of `concurrent.futures.wait`; where all are waited for, the time is up first in half of the cases."""
        if return_when == ALL_COMPLETED and self.random.random() < 0.5:
            return
        self._idle = 0 if futures else self._idle + 1
        assert self._idle < 3, "a loop that waits for nothing spins"
        enough = all if return_when == ALL_COMPLETED else any
        while futures and not enough(map(Future.done, futures)):  # its own look changes nothing
            assert self._due, "nothing is under way that could be waited for"
            self.tick()


class Sudden(Future[Any]):
    """May be done just after it was seen not to be, as futures are that other threads complete."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def done(self) -> bool:
        found = super().done()
        if not found:
            self._world.end_early(self)
        return found


class Engines:
    """The generation group: shards of `max_num_seqs` running requests each, at one policy version."""

    def __init__(self, config: Config) -> None:
        vllm = generation_config(config).vllm_cfg
        self.layout = ParallelLayout(dp=vllm.data_parallel_size)
        self.slots, self.version = vllm.max_num_seqs, 0
        self.requests: list[dict[int, dict[str, Any]]] = [{} for _ in range(self.layout.dp)]

    def generate(self, batch: Batch, rows: Sequence[npt.NDArray[np.intp]]) -> list[Any]:
        """One quantum on every shard."""
        for shard, mine in zip(self.requests, rows, strict=True):
            for row in mine.tolist():
                names = ("request_ids", "seeds", "max_new_tokens", "lengths")
                number, seed, limit, length = (int(batch[name][row]) for name in names)
                assert limit > 0 and length > 0 and number not in shard
                drawn = random.Random(seed)  # noqa: S311
                shard[number] = {"made": [], "drawn": drawn, "ends": drawn.randint(1, 2 * limit), "limit": limit}
        return [self._quantum(shard, steps_of_shard(batch, number)) for number, shard in enumerate(self.requests)]

    def _quantum(self, shard: dict[int, dict[str, Any]], steps: int) -> Any:
        finished = []
        for _ in range(steps):
            for number in list(shard)[: self.slots]:
                request = shard[number]
                request["made"].append((request["drawn"].randrange(4, TOKENS), self.version))
                if len(request["made"]) >= min(request["ends"], request["limit"]):
                    reason = "stop" if request["ends"] <= request["limit"] else "length"
                    finished.append(self._made(number, shard.pop(number), reason))
        return pack_generated(finished, map(Progress, shard), steps)

    def call(self, method: str, numbers: Sequence[int] = (), *, deadline: Deadline) -> Any:
        """What the loops ask the group beside its phases."""
        assert deadline.key == "timeouts.replay_s", "not that of a start"
        if method == "abort_requests":
            return [[shard.pop(number, None) for number in numbers] for shard in self.requests]
        assert method == "unfinished_requests"
        return [[self._made(number, request, "unfinished") for number, request in shard.items()] for shard in self.requests]

    @staticmethod
    def _made(number: int, request: dict[str, Any], reason: str) -> FinishedRequest:
        tokens, versions = ([item[at] for item in request["made"]] for at in (0, 1))
        return FinishedRequest(number, tokens, [logprob_of(version) for version in versions], versions, reason)


def logprob_of(version: int) -> float:
    """What every token of a version has."""
    return -1.0 - version


class Reward:
    """Scores some time later; some groups all alike, some samples not at all."""

    def __init__(self, world: World, max_failed_share: float) -> None:
        self._world, self._max_failed_share, self.closed = world, max_failed_share, False
        self.asked: list[tuple[str, ...]] = []  # the completions of each call
        self.answers: list[Sequence[float | Failed]] = []  # to each call that was answered
        self.checked: list[int] = []  # samples of each check of a training step

    def submit(self, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]) -> Future[Any]:
        assert not self.closed, "the processes that score have ended"
        self.asked.append(tuple(completions))
        most = 60 if self._world.random.random() < 0.1 else 3  # a group whose scores come last of all
        return self._world.later(most, lambda: self._score_all(prompts, completions))

    def _score_all(self, prompts: Sequence[str], completions: Sequence[str]) -> Sequence[float | Failed]:
        self.answers.append([self._score(*pair) for pair in zip(prompts, completions, strict=True)])
        return self.answers[-1]

    def check(self, rewards: Rewards, *, may_all_fail: bool = False) -> None:
        """As `RewardRunner.check`."""
        total, limit = len(rewards.values), self._max_failed_share
        self.checked += [] if may_all_fail else [total]
        check_failures("reward", rewards.failed, total, rewards.message, limit, may_all_fail=may_all_fail)

    @staticmethod
    def _score(prompt: str, text: str) -> float | Failed:
        if text.endswith("9") or prompt == UNANSWERED:
            return Failed("no nines")
        return 0.5 if prompt.startswith("3") else float(len(text))


class Environment:
    """Says 00 after a while to every other completion; what it has not answered when it closes has failed."""

    max_turns, workers = 3, 2

    def __init__(self, world: World) -> None:
        self._world, self._closed = world, False

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True

    def submit(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> Future[list[Reply]]:
        return self._world.later(4, lambda: [self._reply(text) for text in texts])

    def _reply(self, text: str) -> Reply:
        if self._closed:
            return Reply(None, FAILED, "the process that runs it ended")
        return Reply("00" if len(text) % 2 else None)

    def encode(self, text: str, most: int) -> list[int]:
        return [4] * len(text)


class Stop:
    """The stop signal of a run, which counts the looks at it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def requested(self) -> bool:
        return self._run.look()

    def check(self) -> None:
        if self.requested:
            raise StopRequestedError


class Run:
    """One process of a run: `trained` are the batches by the step that learned them, `metrics` those recorded.

    `stop_at`: at which look at the stop signal after the first step a stop has been asked for.
    """

    def __init__(self, config: Config, seed: int, *, stop_at: int | None = None, resumed: Checkpoint | None = None) -> None:
        self.config, self.world, self.engines = config, World(seed), Engines(config)
        self.trained: dict[int, list[ScoredGroup]] = {}
        self.metrics: list[dict[str, float]] = []
        self.replays: list[tuple[str, bool]] = []  # what was submitted (True) and read, in order
        self.experience: Any = None
        self.stop_at, self._checks = stop_at, 0
        tokenizer = character_tokenizer("0123456789+=")
        prompts = [Prompt(f"{n}=", np.array([4 + n % 10, 5]), str(n), f"row {n}") for n in range(9)]
        self.session: Any = SimpleNamespace(
            config=config, step=resumed.state.step if resumed else 0, resumed=resumed, shared=None, savers=[],
            state=resumed.state if resumed else TrainState(0), hold=lambda *roles, **options: None,
            train=SimpleNamespace(call=lambda method, *, deadline: None), generation=self.engines,
            inputs=SimpleNamespace(prompts=prompts, validation_prompts=prompts[:2], tokenizer=tokenizer),
            stop=Stop(self), clock=SimpleNamespace(measure=lambda name: nullcontext()),
            progress=SimpleNamespace(step=lambda *words, **keys: None, status=lambda text: None),
            submit=self._submit, collect=self._collect, lap=lambda tokens: {}, attend=lambda role: None,
            finish_step=self._finish_step, metric=lambda stage, metrics: None,
        )  # fmt: skip

    def train(self) -> TrainState | None:
        """All steps; or, when it was stopped, the state that a checkpoint would have."""
        loop = async_grpo.train_async if self.config.grpo.async_grpo.enabled else grpo.train_grpo
        self.reward = reward = Reward(self.world, self.config.reward.max_failed_share)
        with self._simulated():
            try:
                loop(self.session, reward)  # type: ignore[arg-type]
            except StopRequestedError:
                return self.session.state  # type: ignore[no-any-return]
            finally:
                reward.closed = True
        return None

    def save(self, directory: Path) -> None:
        """What a checkpoint has of the groups under way."""
        for saver in self.session.savers:
            saver(directory)

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        made = experience.Experience.__init__

        def keep(instance: Any, *words: Any, **keys: Any) -> None:
            made(instance, *words, **keys)
            self.experience = instance

        several_turns = self.config.environment.function is not None
        thread = SimpleNamespace(submit=lambda work, *words: self.world.later(12, lambda: work(*words)))
        with ExitStack() as stack:
            for target, name, value in (
                (experience.Experience, "__init__", keep),
                (experience.Experience, "_environment", lambda own: self._environment(own) if several_turns else None),
                (experience, "wait", self.world.wait),
                (async_grpo, "training_thread", lambda: nullcontext(thread)),
                (async_grpo, "learn", self._learn),
                (grpo, "learn", self._learn),
            ):
                stack.enter_context(patch.object(target, name, value))
            yield

    def _environment(self, own: Any) -> Environment:
        return own._stack.enter_context(Environment(self.world))  # type: ignore[no-any-return]

    def _learn(self, session: Any, groups: Sequence[ScoredGroup], step: int, early: Any) -> dict[str, float]:
        assert step == session.step + 1
        session.stop.check()
        self.trained[step] = list(groups)
        return {"trained_tokens": 1.0}

    def look(self) -> bool:
        """Whether a stop has been asked for by now."""
        self._checks += self.session.step > 0
        return self.stop_at is not None and self._checks >= self.stop_at

    def _submit(self, name: str, value: Any, rows: Sequence[npt.NDArray[np.intp]] = ()) -> Any:
        """Engines do at once what they are asked for, as they would in its turn."""
        self.replays.append((name, True))
        if name == "generate":
            return self.engines.generate(value, rows)
        assert name == "refit"
        self.engines.version = value
        return []

    def _collect(self, name: str, results: Any, busy_s: Callable[[Any], float | None] | None = None) -> tuple[Any, Counted]:
        self.replays.append((name, False))
        if name == "generate":
            self.world.tick()
        return results, Counted(name, ("generation",), ReplayTiming(0.0, 1.0, (1.0,) * len(results), None), 1.0, 0.0)

    def _finish_step(self, stage: str, position: int, total: int, metrics: dict[str, float], state: TrainState) -> None:
        self.session.step, self.session.state = state.step, state
        self.metrics.append(metrics)
        self.session.stop.check()
