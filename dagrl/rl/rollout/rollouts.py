"""Rollouts: takes groups of sequences through generation, quantum by quantum and turn by turn.

    rollouts = Rollouts(config, engines, turns)
    rollouts.start(RolloutGroup(...))           # at any time
    while rollouts.busy:
        for group in rollouts.advance():        # one quantum of generation; the groups that it completed
            ...

Two quanta are in flight, so engines do not wait for the driver. Requests wait here, not in the engines, until a shard has a
free slot: the one with the most free slots gets them first, so that shards finish together. Each turn of a sequence is a
request; `dagrl.rl.rollout.turns` decides when there is another. A refit submitted between two calls of `advance` runs
between two quanta.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dagrl.config import Config
from dagrl.config.settings import bucket_widths, generation_config
from dagrl.errors import WorkerError
from dagrl.rl.generation import FIRST_QUANTUM, QUANTUM_SECONDS, Generated, options_text
from dagrl.rl.rollout.engines import GenerationEngines, Quantum
from dagrl.rl.rollout.episodes import RolloutGroup, Turn, token_rows, turn_seed
from dagrl.rl.rollout.turns import Turns
from dagrl.runtime.shapes import Batch

IN_FLIGHT = 2  # quanta in flight: engines run the second while the driver reads the first

LOOKAHEAD = 1.25
"""Requests sent to a shard, as a multiple of those it runs at once, so that a slot freed in a quantum is refilled in it."""

LEAST_S = 0.06
"""The least seconds of a quantum, if the bounds allow: an engine then has work while the driver is busy elsewhere."""

AIM = 0.75  # the share of `overhead_share` that quanta are sized for: overheads vary, and short quanta have theirs too


class Rollouts:
    """See the module's docstring. Not thread-safe."""

    def __init__(self, config: Config, engines: GenerationEngines, turns: Turns, *, media: bool = False) -> None:
        """With `media`, sequences may have images."""
        generation = generation_config(config)
        self._engines, self._turns, self._media = engines, turns, media
        self._room = bucket_widths(config.policy)[-1]
        self._slots = request_slots(generation.vllm_cfg.max_num_seqs)
        self._shards = [ShardLoad(self._slots) for _ in range(engines.shards)]
        self.quantum_size = QuantumSize(
            generation.quantum_engine_steps, QUANTUM_SECONDS, IN_FLIGHT, engines.shards, burst=engines.burst_steps
        )
        grpo, replies = config.grpo, config.environment.enabled
        self._only_rewards_wait = not (replies or grpo.use_dynamic_sampling or grpo.async_grpo.max_age_steps > 0)
        self._groups: dict[int, RolloutGroup] = {}
        self._requests: dict[int, Turn] = {}  # waiting or in an engine
        self._waiting: dict[int, int] = {}  # the cohort of each
        self._quanta: deque[tuple[tuple[int, ...], Quantum]] = deque()  # with the engine steps requested from each shard
        self._next_request = 0

    @property
    def busy(self) -> bool:
        """Whether any group is unfinished."""
        return bool(self._groups)

    @property
    def running(self) -> bool:
        """Whether engines have work: requests or quanta. Requests that wait do not count."""
        return bool(self._quanta) or any(shard.requests for shard in self._shards)

    @property
    def groups(self) -> list[RolloutGroup]:
        """The unfinished groups."""
        return list(self._groups.values())

    @property
    def numbers(self) -> set[int]:
        """The numbers of the unfinished groups."""
        return set(self._groups)

    @property
    def generating(self) -> bool:
        """Whether a quantum would have work: requests wait or run. Sequences that await the environment do not count."""
        return bool(self._requests) and any(shard.slots for shard in self._shards)

    @property
    def serving(self) -> bool:
        """Whether all engines have weights: those that were replaced have none until a refit and `serve`."""
        return all(shard.slots for shard in self._shards)

    def start(self, *groups: RolloutGroup) -> None:
        """Starts the sequences of groups."""
        assert not self.numbers & {group.number for group in groups}
        self._groups |= {group.number: group for group in groups}
        self._request(self._turns.start(groups))

    def advance(self) -> list[RolloutGroup]:
        """Waits for one quantum, with another in flight; returns the groups that are complete."""
        self._request(self._turns.take())
        self._drop_cancelled()
        self.look_ahead()
        if self._quanta:
            self._read()
        return self._take_complete()

    def look_ahead(self) -> None:
        """Submits quanta behind those in flight, or behind a refit, so that engines do not wait for the driver."""
        while self.generating and len(self._quanta) < IN_FLIGHT:
            self._submit()

    def settle(self) -> list[RolloutGroup]:
        """Reads the quanta in flight and brings the engines to rest; returns the groups that are complete."""
        while self._quanta:
            self._read()
        if any(shard.requests for shard in self._shards):
            self._start([], [np.arange(0, dtype=np.intp)] * len(self._shards), (0,) * len(self._shards))
            self._read()
        self._request(self._turns.take())
        return self._take_complete()

    def withdraw(self) -> list[RolloutGroup]:
        """Calls `settle`, and takes unfinished requests out of the engines. They wait here, and begin their turn again."""
        complete = self.settle()
        self._move([request for shard in self._shards for request in shard.requests])
        return complete

    def replace(self, error: WorkerError, *, drop: bool = False) -> list[RolloutGroup]:
        """Replaces engines that failed in a quantum or a refit; returns the groups that are complete.

        Requests of engines that go on are not disturbed if all their results arrived, unless these are to `drop`. Others
        begin their turn again, in any engine. New engines get requests after the next refit and `serve`. Raises `error` if
        the run has to restart.
        """
        self._replace(error, [], drop=drop)
        return self._take_complete()

    def serve(self) -> None:
        """Opens all engines to requests."""
        for shard in self._shards:
            shard.slots = self._slots

    def abort(self, numbers: Iterable[int]) -> None:
        """Drops groups with the tokens made so far. Call `settle` first, so that the engines are at rest."""
        for number in numbers:
            self._turns.abort(self._groups.pop(number))
        gone = [request for request, (group, _) in self._requests.items() if group.number not in self._groups]
        for request in gone:
            self._forget(request)
        self._abort(gone)

    def _abort(self, requests: Sequence[int]) -> None:
        """Takes requests out of the engines. Replaces engines that died since the last quantum."""
        if not requests:
            return
        assert not self._quanta
        try:
            self._engines.abort(requests)
        except WorkerError as error:
            self._replace(error, [])
            self._abort(requests)

    def _request(self, turns: Iterable[Turn]) -> None:
        """Makes a request of each turn, which waits for an engine."""
        for group, episode in turns:
            request, self._next_request = self._next_request, self._next_request + 1
            self._requests[request] = (group, episode)
            self._waiting[request] = group.cohort

    def _submit(self) -> None:
        """Submits a quantum with the requests that shards have room for."""
        sent = dispatch(self._waiting, self._shards)
        chosen = [request for shard in sent for request in shard]
        for request in chosen:
            del self._waiting[request]
        ends = np.cumsum([len(shard) for shard in sent])
        steps = self.quantum_size.next(long=self._only_rewards_wait and not self._waiting)
        self._start(chosen, np.split(np.arange(len(chosen), dtype=np.intp), ends[:-1]), steps)

    def _start(self, requests: Sequence[int], rows: Sequence[npt.NDArray[np.intp]], engine_steps: tuple[int, ...]) -> None:
        """Submits a quantum of `engine_steps[shard]` steps; each shard gets its `rows` of the requests."""
        limit = {} if self.quantum_size.most_s is None else {"seconds": self.quantum_size.most_s}
        batch = self._batch(requests).with_scalars(engine_steps=engine_steps, **limit)
        if options := options_text({request: self._requests[request][1].options for request in requests}):
            batch = batch.with_scalars(options=options)
        self._quanta.append((engine_steps, self._engines.submit(batch, rows)))

    def _read(self) -> None:
        steps, quantum = self._quanta.popleft()
        try:
            result = quantum.result()
        except WorkerError as error:
            self._replace(error, [quantum.partial()])
            return
        learned = [  # 0 of a quantum that ended before its last step and the clock, as its requests did
            part.engine_steps if part.engine_steps == limit or part.unfinished else 0
            for part, limit in zip(result.generated, steps, strict=True)
        ]
        self.quantum_size.record(learned, result.busy_s, result.overhead_s)
        self._take_all(result.generated)

    def _take_all(self, generated: Iterable[Generated]) -> None:
        """Takes finished requests."""
        ended = []
        for result in [request for part in generated for request in part.requests()]:
            group, episode = self._requests[result.request_id]
            self._forget(result.request_id)
            episode.append(result)
            episode.turns += 1
            ended.append(((group, episode), result))
        self._turns.finish(ended)

    def _replace(self, error: WorkerError, parts: list[Mapping[int, Generated]], *, drop: bool = False) -> None:
        """Replaces failed engines. `parts` are the results of the quanta that have failed already, by shard."""
        arrived = [_arrived(quantum) for _, quantum in self._quanta]
        parts += [{}] * len(arrived) if drop else arrived
        self._quanta.clear()
        replaced = self._engines.replace(error)
        if replaced is None:
            raise error
        for part in parts:
            self._take_all(part.values())
        for number in replaced:
            self._shards[number].slots = 0
        lost = [number for number in range(len(self._shards)) if not all(number in part for part in parts)]
        self._move([request for number in {*replaced, *lost} for request in self._shards[number].requests])

    def _move(self, requests: Sequence[int]) -> None:
        """Makes these requests wait for any engine again, from the start of their turns."""
        turns = [self._requests[request] for request in requests]
        for request in requests:
            self._forget(request)
        self._request(turns)
        self._abort(requests)

    def _drop_cancelled(self) -> None:
        """Takes requests that nobody waits for out of the queue and the engines."""
        gone = [request for request, (_, episode) in self._requests.items() if episode.cancelled]
        if any(request not in self._waiting for request in gone):
            while self._quanta:
                self._read()
            gone = [request for request in gone if request in self._requests]
        running = [request for request in gone if request not in self._waiting]
        for request in gone:
            self._forget(request)
        self._abort(running)

    def _forget(self, request: int) -> None:
        del self._requests[request]
        self._waiting.pop(request, None)
        for shard in self._shards:
            shard.requests.discard(request)

    def _take_complete(self) -> list[RolloutGroup]:
        complete = [group for group in self._groups.values() if group.complete]
        for group in complete:
            del self._groups[group.number]
        return complete

    def _batch(self, requests: Sequence[int]) -> Batch:
        """Returns one row per request: the prompt and the completion so far."""
        episodes = [self._requests[request][1] for request in requests]
        limits = [min(episode.max_new_tokens, self._room - len(episode)) for episode in episodes]
        return token_rows(episodes, media=self._media).with_fields(
            request_ids=np.array(requests, np.int64),
            seeds=np.array([turn_seed(episode) for episode in episodes], np.int64),
            max_new_tokens=np.array(limits, np.int64),
            greedy=np.array([episode.greedy for episode in episodes], np.int64),
        )


def _arrived(quantum: Quantum) -> Mapping[int, Generated]:
    """Returns the results of the shards that finished a quantum, which may fail."""
    try:
        return dict(enumerate(quantum.result().generated))
    except WorkerError:
        return quantum.partial()


def request_slots(max_num_seqs: int) -> int:
    """Returns the maximum number of requests that a shard holds."""
    return max(max_num_seqs + 1, int(max_num_seqs * LOOKAHEAD))


@dataclass
class ShardLoad:
    """The unfinished requests of a shard, and how many it may hold."""

    slots: int
    requests: set[int] = field(default_factory=set)

    @property
    def free(self) -> int:
        """Requests that the shard can take."""
        return self.slots - len(self.requests)


def dispatch(waiting: Mapping[int, int], shards: Sequence[ShardLoad]) -> list[list[int]]:
    """Returns the requests to send to each shard now, and adds them to its load. The rest keeps waiting.

    `waiting` has the cohort of each request; lower cohorts are sent first.
    """
    sent: list[list[int]] = [[] for _ in shards]
    for request in sorted(waiting, key=waiting.__getitem__):
        index = max(range(len(shards)), key=lambda index: shards[index].free)
        if shards[index].free <= 0:
            break
        shards[index].requests.add(request)
        sent[index].append(request)
    return sent


@dataclass
class QuantumSize:
    """Engine steps of a quantum on each of `shards` shards: `fixed`, or as many as take the same time on every shard.

    That time is at least `LEAST_S` and `burst` steps on the slowest shard, and long enough that starting a quantum costs
    less than `overhead_share` of it. It is at most `seconds / in_flight`: a refit waits for all quanta in flight, and they
    take at most `seconds` together. That upper bound wins; long quanta reach it. Shards with fewer sequences or a faster
    core make more steps, so no shard waits for another at the end of a quantum. Times are smoothed over about ten quanta.

    Quanta are whole bursts where they can be: a burst of few steps takes as long as its bookkeeping, so short quanta look
    slow and would become shorter still.

    The sizes are sent with the requests, so that all ranks of a shard run the same steps; their clocks would disagree.
    If steps become slower than measured, an engine of a single rank ends its quantum by the clock, after `most_s`.
    """

    fixed: int | None
    seconds: float
    in_flight: int = 1
    shards: int = 1
    overhead_share: float = 0.01
    burst: int = 1
    step_s: dict[int, float] = field(default_factory=dict)
    overhead_s: float | None = None
    left_s: dict[int, float] = field(default_factory=dict)

    def record(self, engine_steps: Sequence[int], busy_s: Sequence[float], overhead_s: float) -> None:
        """Records a quantum: for each shard the steps made and the seconds its engine computed, and the overhead.

        Pass 0 steps for a shard whose requests ended early: its few steps bear all the fixed cost.
        """
        for shard, (steps, seconds) in enumerate(zip(engine_steps, busy_s, strict=True)):
            if steps > 0 and seconds > 0:
                self.step_s[shard] = _smooth(self.step_s.get(shard), seconds / steps)
        if any(engine_steps):
            self.overhead_s = _smooth(self.overhead_s, overhead_s)

    @property
    def most_s(self) -> float | None:
        """The most seconds of a quantum, so that all in flight take at most `seconds`; None if steps are fixed."""
        return self.seconds / self.in_flight if self.fixed is None else None

    def next(self, *, long: bool = False) -> tuple[int, ...]:
        """Returns the engine steps of the next quantum on each shard, `long` where only rewards wait for its results."""
        if self.fixed is not None:
            return (self.fixed,) * self.shards
        slowest = max(self.step_s.values(), default=0.0)
        if not slowest or self.overhead_s is None:
            return (FIRST_QUANTUM,) * self.shards
        aim = AIM * self.overhead_share
        least = -_down(-max(self.overhead_s * (1 - aim) / aim, LEAST_S) / slowest)
        allowed = _down(self.seconds / self.in_flight / slowest)
        together_s = max(allowed if long else min(max(least, self.burst), allowed), 1) * slowest
        return tuple(self._steps(shard, self.step_s.get(shard, slowest), together_s) for shard in range(self.shards))

    def _steps(self, shard: int, step_s: float, seconds: float) -> int:
        """Steps that a shard makes in `seconds` plus what its last quantum left over, within the bound."""
        seconds += self.left_s.get(shard, 0.0)
        steps = max(min(_down(seconds / step_s), _down(self.seconds / self.in_flight / step_s)), 1)
        unit = self.burst if steps > self.burst else 1
        steps -= steps % unit
        self.left_s[shard] = min(max(seconds - steps * step_s, 0.0), unit * step_s)
        return steps


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else 0.9 * before + 0.1 * value


def _down(steps: float) -> int:
    """Rounds down, except for floating-point error."""
    return math.floor(steps + 1e-6)
