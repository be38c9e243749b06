"""What a quantum of generation returns, and how the ranks of a shard agree on it.

A quantum is one replay of the `generate` phase: every tensor-parallel rank of a shard runs the same engine steps over the
same requests and returns the same `Generated`. No rank sends its sampled tokens to the others, so equality is checked: a
rank that drew other tokens would run another batch from then on and hang its peers in the next collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dagrl.errors import RunError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class FinishedRequest:
    """One finished request: its sampled tokens, their log-probabilities and the policy version that made each of them."""

    request_id: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str


@dataclass(frozen=True)
class Generated:
    """The requests that finished in a quantum, by request id; `m` requests, the longest of `L` new tokens.

    `logprobs` are of the distribution that was sampled from (after temperature, top-p and top-k; of the model's own at
    temperature 0). `finish_reasons` are `stop` or `length`. `unfinished` requests stay in the engine. `digest` covers all
    but the log-probabilities.
    """

    request_ids: IntArray  # [m]
    tokens: IntArray  # [m, L], 0 past lengths
    lengths: IntArray  # [m]
    logprobs: FloatArray  # [m, L]
    versions: IntArray  # [m, L]
    finish_reasons: tuple[str, ...]
    unfinished: int
    engine_steps: int
    digest: str = field(default="")

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", _digest(self))

    def __len__(self) -> int:
        return len(self.request_ids)

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


def pack_generated(finished: Iterable[FinishedRequest], unfinished: int, engine_steps: int) -> Generated:
    """A `Generated` from finished requests, in the order of their ids."""
    rows = sorted(finished, key=lambda request: request.request_id)
    shape = (len(rows), max((len(row.tokens) for row in rows), default=0))
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
        unfinished=unfinished,
        engine_steps=engine_steps,
    )


def merge_generated(parts: Sequence[Generated]) -> Generated:
    """The result of a shard from those of its ranks; associative. Raises RunError that names the first unequal request."""
    first = parts[0]
    for rank, part in enumerate(parts[1:], start=1):
        if part.digest != first.digest:
            raise RunError(
                f"tensor-parallel ranks of one generation shard disagree: {_difference(first, part)} (part {rank} of "
                f"{len(parts)} against part 0). They must draw the same tokens; restart the generation workers, and keep "
                "vLLM's custom all-reduce off"
            )
    return first


def _digest(generated: Generated) -> str:
    counts = (len(generated), generated.unfinished, generated.engine_steps, *generated.tokens.shape)
    digest = hashlib.blake2b(repr((counts, generated.finish_reasons)).encode(), digest_size=16)
    for array in (generated.request_ids, generated.lengths, generated.tokens, generated.versions):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _difference(first: Generated, second: Generated) -> str:
    ours = {int(request): row for row, request in enumerate(first.request_ids)}
    theirs = {int(request): row for row, request in enumerate(second.request_ids)}
    for request in sorted(ours.keys() ^ theirs.keys()):
        return f"request {request} finished on one rank only"
    for request, row in sorted(ours.items()):
        one, other = first.request(row), second.request(theirs[request])
        if (one.tokens, one.versions, one.finish_reason) != (other.tokens, other.versions, other.finish_reason):
            return (
                f"request {request} has tokens {one.tokens} ({one.finish_reason}) and {other.tokens} ({other.finish_reason})"
            )
    counts = [(part.unfinished, part.engine_steps) for part in (first, second)]
    return f"no finished request differs, but (unfinished requests, engine steps) are {counts[0]} and {counts[1]}"
