"""What a quantum of generation returns, and how the ranks of a shard agree on it.

A quantum is one replay of the `generate` phase: every tensor-parallel rank of a shard runs the same engine steps over the
same requests and returns the same `Generated`. No rank sends its sampled tokens to the others, so equality is checked, of
the requests that go on as of those that finished: a rank that drew other tokens would run another batch from then on and
hang its peers in the next collective.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dagrl.errors import RunError
from dagrl.shapes import Batch

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


FIRST_QUANTUM = 16
"""Engine steps of a quantum while it is not known what they take."""


def steps_of_shard(batch: Batch, shard: int) -> int:
    """Engine steps of a quantum on one shard: the scalar `engine_steps`, of all shards or of each; in a warm-up a few."""
    steps = batch.scalars.get("engine_steps", FIRST_QUANTUM)
    return steps[shard] if isinstance(steps, tuple) else int(steps)


def seconds_of(batch: Batch) -> float:
    """Seconds after which an engine of one rank ends a quantum, with the step it is in: the scalar `seconds`, if any."""
    return batch.number("seconds", math.inf)


@dataclass(frozen=True)
class FinishedRequest:
    """One finished request: its sampled tokens, their log-probabilities and the policy version that made each of them."""

    request_id: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str


@dataclass(frozen=True)
class Progress:
    """How far a request is that has not finished: its new tokens, and a checksum of them (see `checksum`)."""

    request_id: int
    tokens: int = 0
    checksum: int = 0


def checksum(tokens: Sequence[int], before: int = 0) -> int:
    """CRC-32 of tokens, going on from the checksum of those `before` them."""
    return zlib.crc32(array("q", tokens), before)


@dataclass(frozen=True)
class Generated:
    """The requests that finished in a quantum, by request id; `m` requests, the longest of `L` new tokens.

    `logprobs` are of the distribution that was sampled from (after temperature, top-p and top-k; of the model's own at
    temperature 0). `finish_reasons` are `stop` or `length`. `running` are the `r` requests that stay in the engine: id,
    number of new tokens and checksum of each. `digest` covers all but the log-probabilities.
    """

    request_ids: IntArray  # [m]
    tokens: IntArray  # [m, L], 0 past lengths
    lengths: IntArray  # [m]
    logprobs: FloatArray  # [m, L]
    versions: IntArray  # [m, L]
    finish_reasons: tuple[str, ...]
    running: IntArray  # [r, 3]
    engine_steps: int
    digest: str = field(default="")

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", _digest(self))

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def unfinished(self) -> int:
        """Requests that stay in the engine."""
        return len(self.running)

    def request(self, row: int) -> FinishedRequest:
        """Row `row` without its padding."""
        length = int(self.lengths[row])
        return FinishedRequest(
            request_id=int(self.request_ids[row]),
            tokens=self.tokens[row, :length].tolist(),
            logprobs=self.logprobs[row, :length].tolist(),
            versions=self.versions[row, :length].tolist(),
            finish_reason=self.finish_reasons[row],
        )


def pack_generated(finished: Iterable[FinishedRequest], running: Iterable[Progress], engine_steps: int) -> Generated:
    """A `Generated` from finished requests and those that go on, in the order of their ids."""
    rows = sorted(finished, key=lambda request: request.request_id)
    shape = (len(rows), max((len(row.tokens) for row in rows), default=0))
    progress = sorted((item.request_id, item.tokens, item.checksum) for item in running)
    tokens, versions, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for index, row in enumerate(rows):
        length = len(row.tokens)
        assert len(row.logprobs) == len(row.versions) == length, f"request {row.request_id}: ragged row"
        tokens[index, :length] = row.tokens
        versions[index, :length] = row.versions
        logprobs[index, :length] = row.logprobs
    return Generated(
        request_ids=np.array([row.request_id for row in rows], np.int64),
        tokens=tokens,
        lengths=np.array([len(row.tokens) for row in rows], np.int64),
        logprobs=logprobs,
        versions=versions,
        finish_reasons=tuple(row.finish_reason for row in rows),
        running=np.array(progress, np.int64).reshape(-1, 3),
        engine_steps=engine_steps,
    )


def merge_generated(parts: Sequence[Generated]) -> Generated:
    """The result of a shard from those of its ranks; associative. Raises RunError that names the first unequal request."""
    first = parts[0]
    for rank, part in enumerate(parts[1:], start=1):
        if part.digest != first.digest:
            raise disagreement(f"{_difference(first, part)} (part {rank} of {len(parts)} against part 0)")
    return first


def disagreement(what: str) -> RunError:
    """The error of ranks that did not do the same; `what` says where they part."""
    return RunError(
        f"tensor-parallel ranks of one generation shard disagree: {what}. They must draw the same tokens; restart the "
        "generation workers, and keep vLLM's custom all-reduce off"
    )


def _digest(generated: Generated) -> str:
    counts = (len(generated), generated.engine_steps, *generated.tokens.shape)
    digest = hashlib.blake2b(repr((counts, generated.finish_reasons)).encode(), digest_size=16)
    for part in (generated.request_ids, generated.lengths, generated.tokens, generated.versions, generated.running):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def _difference(first: Generated, second: Generated) -> str:
    ours = {int(request): row for row, request in enumerate(first.request_ids)}
    theirs = {int(request): row for row, request in enumerate(second.request_ids)}
    for request in sorted(ours.keys() ^ theirs.keys()):
        return f"request {request} finished on one rank only"
    for request, row in sorted(ours.items()):
        one, other = first.request(row), second.request(theirs[request])
        if (one.tokens, one.versions, one.finish_reason) != (other.tokens, other.versions, other.finish_reason):
            return f"request {request} {_first_difference(one, other)}"
    return _running_difference(first, second)


def _first_difference(one: FinishedRequest, other: FinishedRequest) -> str:
    """Where two ranks part, and what each drew there: sequences are too long to be shown."""
    place = next((at for at, pair in enumerate(zip(one.tokens, other.tokens, strict=False)) if pair[0] != pair[1]), None)
    if place is not None:
        return f"has at its new token {place} the tokens {one.tokens[place]} and {other.tokens[place]}"
    ends = [f"{len(rank.tokens)} new tokens ({rank.finish_reason})" for rank in (one, other)]
    return f"has equal tokens as far as both go, but {' and '.join(ends)}, or other policy versions"


def _running_difference(first: Generated, second: Generated) -> str:
    ours, theirs = ({int(row[0]): row[1:].tolist() for row in part.running} for part in (first, second))
    for request in sorted(ours.keys() ^ theirs.keys()):
        return f"request {request} runs on one rank only"
    for request in sorted(ours):
        if ours[request] != theirs[request]:
            (count, crc), (other_count, other_crc) = ours[request], theirs[request]
            return (
                f"the new tokens of request {request}, which runs, are {count} with the checksum {crc:08x}, and "
                f"{other_count} with {other_crc:08x}"
            )
    return f"no request differs, but the engine steps are {first.engine_steps} and {second.engine_steps}"
