"""Rollouts: groups of sequences on their way through generation, quantum by quantum, turn by turn.

    rollouts = Rollouts(session, environment)
    rollouts.start(RolloutGroup(...))           # at any time
    while rollouts.busy:
        for group in rollouts.advance():        # one quantum of generation; the groups that it completed
            ...

Two quanta are in flight, so that the engines do not wait for the driver. Requests wait here, not in the engines, until a
shard has a free slot (`dagrl.loops.dispatch`). Where an environment answers a completion, its text is appended and the
sequence goes on as a new request. Who asks for a refit between two calls of `advance` gets it between two quanta.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from dagrl.config.settings import bucket_widths, generation_config
from dagrl.environments import ENDED, EnvironmentRunner, Reply
from dagrl.function_runner import split_answered
from dagrl.generation import FinishedRequest, Generated
from dagrl.loops.dispatch import LengthHistory, QuantumSize, ShardLoad, Waiting, dispatch
from dagrl.loops.episodes import Episode, RolloutGroup, half_stop, token_rows, turn_seed
from dagrl.loops.session import Session
from dagrl.replay import Replay
from dagrl.shapes import Batch

IN_FLIGHT = 2
"""Quanta submitted at once; the engines work on the second while the driver reads the first."""

LOOKAHEAD = 1.25
"""Requests sent to a shard, as a multiple of those it runs at once, so that a slot freed in a quantum is filled in it."""

ABORTED = "aborted"


Turn = tuple[RolloutGroup, Episode]
"""A sequence whose turn has ended."""


@dataclass(frozen=True)
class _Asked:
    """Sequences that the environment was asked about in one call."""

    turns: Sequence[Turn]
    replies: Future[list[Reply]]


class Rollouts:
    """See the module's first lines. For one thread."""

    def __init__(self, session: Session, environment: EnvironmentRunner | None = None) -> None:
        generation, config = generation_config(session.config), session.config
        layout = generation.vllm_cfg.layout
        self._session = session
        self._environment = environment
        self._room = bucket_widths(config.policy)[-1]
        self._longest_first = generation.request_order == "longest_first"
        slots = request_slots(generation.vllm_cfg.max_num_seqs)
        self._shards = [ShardLoad(slots) for _ in range(layout.dp)]
        self._size = QuantumSize(generation.quantum_engine_steps, generation.quantum_seconds, IN_FLIGHT, layout.dp)
        self.history = LengthHistory(float(generation.max_new_tokens))
        self._groups: dict[int, RolloutGroup] = {}
        self._requests: dict[int, tuple[RolloutGroup, Episode]] = {}  # waiting, or in an engine
        self._waiting: dict[int, Waiting] = {}
        self._asked: list[_Asked] = []
        self._quanta: deque[tuple[tuple[int, ...], Replay]] = deque()  # with the engine steps that each shard was asked for
        self._next_request = 0

    @property
    def busy(self) -> bool:
        """Whether any group is under way."""
        return bool(self._groups)

    @property
    def groups(self) -> list[RolloutGroup]:
        """The groups under way."""
        return list(self._groups.values())

    @property
    def numbers(self) -> set[int]:
        """The groups under way."""
        return set(self._groups)

    @property
    def generating(self) -> bool:
        """Whether a quantum would have something to do: requests wait or run (not: an environment is asked)."""
        return bool(self._requests)

    @property
    def pending(self) -> list[Future[list[Reply]]]:
        """Calls of the environment that are not answered."""
        return [asked.replies for asked in self._asked]

    def start(self, group: RolloutGroup) -> None:
        """Let a group's sequences begin, or go on where they have tokens already."""
        assert group.number not in self._groups
        self._groups[group.number] = group
        self._ask([(group, episode) for episode in group.episodes if episode.awaiting])
        for episode in group.episodes:
            if not (episode.finish_reason or episode.awaiting):
                self._request(group, episode)

    def advance(self) -> list[RolloutGroup]:
        """Wait for one quantum, while another is under way; the groups that are complete by then."""
        self._take_answers()
        self.look_ahead()
        if self._quanta:
            self._read()
        return self._take_complete()

    def look_ahead(self) -> None:
        """Start quanta behind what engines have been asked for, a refit too, so that they need not wait for the driver."""
        while self._requests and len(self._quanta) < IN_FLIGHT:
            self._submit()

    def settle(self) -> list[RolloutGroup]:
        """Read the quanta in flight and bring the engines to rest; the groups that are complete by then."""
        while self._quanta:
            self._read()
        if any(shard.requests for shard in self._shards):
            self._start([], [np.arange(0, dtype=np.intp)] * len(self._shards), (0,) * len(self._shards))
            self._read()
        self._take_answers()
        return self._take_complete()

    def withdraw(self) -> list[RolloutGroup]:
        """`settle`, and take what runs out of the engines: it waits here, to go on from its tokens as a new request."""
        complete = self.settle()
        running = [request for shard in self._shards for request in shard.requests]
        if running:
            assert self._session.generation is not None
            made = self._made_so_far()
            self._session.generation.call("abort_requests", running, deadline=self._session.config.timeouts.replay)
            for request in running:
                group, episode = self._requests[request]
                self._forget(request)
                if request in made:
                    episode.append(made[request])
                self._request(group, episode)
        return complete

    def leave_questions(self) -> None:
        """Let go of the environment, which closes: what it was asked stays asked (`Episode.awaiting`), for a checkpoint."""
        self._asked.clear()

    def abort(self, numbers: Iterable[int]) -> None:
        """Give up groups, with what they have made so far; call `settle` first, so that the engines are at rest."""
        for number in numbers:
            group = self._groups.pop(number)
            for episode in group.episodes:
                episode.finish_reason = episode.finish_reason or ABORTED
        gone = [request for request, (group, _) in self._requests.items() if group.number not in self._groups]
        if gone:
            assert self._session.generation is not None and not self._quanta
            self._session.generation.call("abort_requests", gone, deadline=self._session.config.timeouts.replay)
        for request in gone:
            self._forget(request)

    def snapshot(self) -> list[RolloutGroup]:
        """The groups under way with all tokens made so far, the engines at rest; they go on. Call `settle` first."""
        partial = self._made_so_far()
        return [self._copy(group, partial) for group in self._groups.values()]

    def _made_so_far(self) -> dict[int, FinishedRequest]:
        """What the requests in the engines have made, by request."""
        assert self._session.generation is not None and not self._quanta
        layout, deadline = self._session.generation.layout, self._session.config.timeouts.replay
        parts = self._session.generation.call("unfinished_requests", deadline=deadline)
        return {made.request_id: made for dp in range(layout.dp) for made in parts[layout.shard(dp)[0]]}

    def _copy(self, group: RolloutGroup, partial: Mapping[int, FinishedRequest]) -> RolloutGroup:
        requests = {id(episode): request for request, (_, episode) in self._requests.items()}
        episodes = []
        for episode in group.episodes:
            copy = replace(
                episode,
                tokens=list(episode.tokens),
                logprobs=list(episode.logprobs),
                versions=list(episode.versions),
                sampled=list(episode.sampled),
            )
            if (made := partial.get(requests.get(id(episode), -1))) is not None:
                copy.append(made)
            episodes.append(copy)
        return RolloutGroup(group.number, group.key, episodes, group.cohort)

    def _request(self, group: RolloutGroup, episode: Episode) -> None:
        if stops := generation_config(self._session.config).stop_strings:
            # Engines look for them in what a request makes: what begins one is made again.
            decode = partial(self._session.inputs.tokenizer.decode, skip_special_tokens=True)
            episode.take_back(half_stop(episode.tokens[episode.turn_start :], stops, decode))
        request, self._next_request = self._next_request, self._next_request + 1
        self._requests[request] = (group, episode)
        expected = max(self.history.expected(group.key) - (len(episode.tokens) - episode.turn_start), 1.0)
        self._waiting[request] = Waiting(request, group.cohort, expected)

    def _submit(self) -> None:
        """Start a quantum with the requests that fit."""
        sent = dispatch(list(self._waiting.values()), self._shards, longest_first=self._longest_first)
        chosen = [item.request_id for shard in sent for item in shard]
        for request in chosen:
            del self._waiting[request]
        ends = np.cumsum([len(shard) for shard in sent])
        self._start(chosen, np.split(np.arange(len(chosen), dtype=np.intp), ends[:-1]), self._size.next())

    def _start(self, requests: Sequence[int], rows: Sequence[npt.NDArray[np.intp]], engine_steps: tuple[int, ...]) -> None:
        """Start a quantum of so many engine steps on each shard with these requests, of which it gets its `rows`."""
        limit = {} if self._size.most_s is None else {"seconds": self._size.most_s}
        batch = self._batch(requests).with_scalars(engine_steps=engine_steps, **limit)
        self._quanta.append((engine_steps, self._session.submit("generate", batch, rows=rows)))

    def _read(self) -> None:
        asked, quantum = self._quanta.popleft()
        found, counted = self._session.collect("generate", quantum)
        results = cast("Sequence[Generated]", found)
        learned = [_steps_to_learn_from(part, steps) for part, steps in zip(results, asked, strict=True)]
        self._size.record(learned, counted.timing.shards_busy_s, counted.overhead_s)
        made = [part.request(row) for part in results for row in range(len(part))]
        self._ask([turn for request in made if (turn := self._finish(request)) is not None])

    def _finish(self, made: FinishedRequest) -> Turn | None:
        """Take up a finished request; its turn, if the environment is to answer it."""
        group, episode = self._requests[made.request_id]
        self._forget(made.request_id)
        episode.append(made)
        episode.turns += 1
        self.history.record(group.key, len(episode.tokens) - episode.turn_start)
        if self._environment is None or made.finish_reason != "stop" or episode.turns >= self._environment.max_turns:
            episode.finish_reason = made.finish_reason
            return None
        return group, episode

    def _ask(self, turns: Sequence[Turn]) -> None:
        """Ask the environment about these sequences, in one call for each of its processes."""
        for _, episode in turns:
            episode.awaiting = self._environment is not None
            episode.finish_reason = "" if episode.awaiting else ENDED  # a resumed run may have no environment any more
        if self._environment is None:
            return
        for first in range(min(self._environment.workers, len(turns))):
            part = turns[first :: self._environment.workers]
            replies = self._environment.submit([episode.prompt for _, episode in part], self._texts(part))
            self._asked.append(_Asked(part, replies))

    def _take_answers(self) -> None:
        answered, self._asked = split_answered(self._asked, lambda asked: asked.replies)
        for asked in answered:
            for (group, episode), reply in zip(asked.turns, asked.replies.result(), strict=True):
                if not episode.finish_reason:  # not aborted meanwhile
                    self._go_on(group, episode, reply)

    def _go_on(self, group: RolloutGroup, episode: Episode, reply: Reply) -> None:
        assert self._environment is not None
        episode.awaiting, episode.failure = False, reply.failure
        room = self._room - len(episode)
        tokens = [] if reply.text is None else self._environment.encode(reply.text, room)
        if not tokens:
            episode.finish_reason = reply.reason
        elif len(tokens) >= room:
            episode.finish_reason = "length"
        else:
            episode.answer(tokens)
            self._request(group, episode)

    def _forget(self, request: int) -> None:
        del self._requests[request]
        self._waiting.pop(request, None)
        for shard in self._shards:
            shard.requests.pop(request, None)

    def _take_complete(self) -> list[RolloutGroup]:
        complete = [group for group in self._groups.values() if group.complete]
        for group in complete:
            del self._groups[group.number]
        return complete

    def _batch(self, requests: Sequence[int]) -> Batch:
        """One row a request: the prompt and what follows it so far."""
        episodes = [self._requests[request][1] for request in requests]
        limits = [min(episode.turn_left, self._room - len(episode)) for episode in episodes]
        return token_rows(episodes).with_fields(
            request_ids=np.array(requests, np.int64),
            seeds=np.array([turn_seed(episode) for episode in episodes], np.int64),
            max_new_tokens=np.array(limits, np.int64),
            greedy=np.zeros(len(episodes), np.int64),
        )

    def _texts(self, turns: Sequence[Turn]) -> list[str]:
        tokens = [episode.tokens for _, episode in turns]
        return cast("list[str]", self._session.inputs.tokenizer.batch_decode(tokens, skip_special_tokens=True))


def _steps_to_learn_from(part: Generated, asked: int) -> int:
    """Engine steps of a quantum that was whole, or ended by the clock; 0 where its requests had ended before."""
    return part.engine_steps if part.engine_steps == asked or part.unfinished else 0


def request_slots(max_num_seqs: int) -> int:
    """Requests that a shard is sent at most."""
    return max(max_num_seqs + 1, int(max_num_seqs * LOOKAHEAD))
