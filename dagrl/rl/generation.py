"""The result of a generation quantum, and the check that the ranks of a shard agree on it.

A quantum is one replay of the `generate` phase. Every tensor-parallel rank of a shard runs the same engine steps on the same
requests and returns the same `Generated`. Ranks do not exchange sampled tokens, so equality is checked, for finished and for
running requests: a rank that sampled other tokens would run a different batch from then on and hang its peers in the next
collective.
"""

import json
import math
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from dagrl.errors import RunError
from dagrl.rl.routed_experts import Record
from dagrl.runtime.shapes import Batch

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

COMPARED = ("request_ids", "tokens", "lengths", "versions", "running")
"""Arrays of `Generated` that are equal on all ranks of a shard; the last bits of log-probabilities may differ."""

FIRST_QUANTUM = 16  # engine steps of a quantum before their duration is known
QUANTUM_SECONDS = 0.5  # longest time that a weight update waits for running quanta, unless `quantum_engine_steps` is set


def quantum_steps(batch: Batch, shard: int) -> int:
    """Returns the engine steps of a quantum on one shard: the scalar `engine_steps`, one for all shards or one per shard."""
    steps = batch.scalars.get("engine_steps", FIRST_QUANTUM)
    return steps[shard] if isinstance(steps, tuple) else int(steps)


def quantum_seconds(batch: Batch) -> float:
    """Returns the seconds after which a single-rank engine ends a quantum with its current step: the scalar `seconds`."""
    return batch.number("seconds", math.inf)


@dataclass(frozen=True)
class RequestOptions:
    """Sampling parameters of a request that differ from the configuration (None: as configured), and its stop strings."""

    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()


AS_CONFIGURED = RequestOptions()

OPTION_BYTES = 512  # room for the options of one request in a quantum's batch


def options_text(options: Mapping[int, RequestOptions]) -> str:
    """Returns the scalar `options` of a quantum: JSON. Requests sampled as configured are left out."""
    changed = {request: asdict(item) for request, item in options.items() if item != AS_CONFIGURED}
    return json.dumps(changed, ensure_ascii=False) if changed else ""


def quantum_options(batch: Batch) -> dict[int, RequestOptions]:
    """Returns the options of the requests that have some, by request id."""
    content = json.loads(str(batch.scalars.get("options", "")).strip() or "{}")
    return {int(request): RequestOptions(**{**item, "stop": tuple(item["stop"])}) for request, item in content.items()}


@dataclass(frozen=True)
class FinishedRequest:
    """A finished request: its sampled tokens, their log-probabilities, and the policy version that sampled each.

    `experts`: with `policy.router_replay`, the record of prompt and completion, of which the last tokens may be missing.
    """

    request_id: int
    tokens: Sequence[int] | IntArray
    logprobs: Sequence[float] | FloatArray
    versions: Sequence[int] | IntArray
    finish_reason: str
    experts: Record | None = None


@dataclass(frozen=True)
class RequestProgress:
    """Progress of a running request: the number of its new tokens and their `checksum`."""

    request_id: int
    tokens: int = 0
    checksum: int = 0


def checksum(tokens: Sequence[int], before: int = 0) -> int:
    """Returns the CRC-32 of tokens, continuing the checksum of the tokens `before`."""
    return zlib.crc32(array("q", tokens), before)


@dataclass(frozen=True)
class Generated:
    """The `m` requests that finished in a quantum, sorted by id; the longest has `L` new tokens.

    `logprobs` are of the sampling distribution: after temperature, top-p and top-k, or the model's own at temperature 0.
    `finish_reasons` are `stop` or `length`. `running` has id, number of new tokens and checksum of the `r` requests that
    stay in the engine. `experts` are the requests' records, or none at all.
    """

    request_ids: IntArray  # [m]
    tokens: IntArray  # [m, L], 0 past lengths
    lengths: IntArray  # [m]
    logprobs: FloatArray  # [m, L]
    versions: IntArray  # [m, L]
    finish_reasons: tuple[str, ...]
    running: IntArray  # [r, 3]
    engine_steps: int
    experts: tuple[Record | None, ...] = ()

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def unfinished(self) -> int:
        """Number of requests that stay in the engine."""
        return len(self.running)

    def request(self, row: int) -> FinishedRequest:
        """Returns row `row` without padding, as lists."""
        length, experts = self.lengths[row], self.experts[row] if self.experts else None
        return FinishedRequest(
            int(self.request_ids[row]),
            self.tokens[row, :length].tolist(),
            self.logprobs[row, :length].tolist(),
            self.versions[row, :length].tolist(),
            self.finish_reasons[row],
            experts,
        )

    def requests(self) -> list[FinishedRequest]:
        """Returns all rows without padding, as arrays: copies, as views would keep the slot of the result in the channel."""
        experts, inside = self.experts or (None,) * len(self), np.arange(self.tokens.shape[1]) < self.lengths[:, None]
        tokens, logprobs, versions = self.tokens[inside], self.logprobs[inside], self.versions[inside]
        ends = np.cumsum(self.lengths).tolist()
        rows = zip(self.request_ids.tolist(), [0, *ends], ends, self.finish_reasons, experts, strict=False)
        return [
            FinishedRequest(request, tokens[start:end], logprobs[start:end], versions[start:end], reason, record)
            for request, start, end, reason, record in rows
        ]


def pack_generated(finished: Iterable[FinishedRequest], running: Iterable[RequestProgress], engine_steps: int) -> Generated:
    """Packs finished and running requests, sorted by id."""
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
        experts=tuple(row.experts for row in rows) if any(row.experts is not None for row in rows) else (),
    )


def merge_generated(parts: Sequence[Generated]) -> Generated:
    """Merges the equal results of a shard's ranks; associative. Raises RunError that names the first unequal request."""
    first = parts[0]
    for rank, part in enumerate(parts[1:], start=1):
        counted = (part.finish_reasons, part.engine_steps) == (first.finish_reasons, first.engine_steps)
        if not counted or not all(np.array_equal(getattr(part, name), getattr(first, name)) for name in COMPARED):
            ours, theirs = _states(first), _states(part)
            requests = sorted(ours.keys() | theirs.keys())
            request = next((request for request in requests if ours.get(request) != theirs.get(request)), None)
            if request is None:
                what = f"all requests are equal, but the engine steps are {first.engine_steps} and {part.engine_steps}"
            else:
                what = f"request {request} {ours.get(request, 'is absent')}, but {theirs.get(request, 'is absent')}"
            raise disagreement(f"{what} (part {rank} of {len(parts)} against part 0)")
    return first


def disagreement(what: str) -> RunError:
    """Returns the error of ranks that differ; `what` says where."""
    return RunError(
        f"tensor-parallel ranks of a generation shard disagree: {what}. They must sample the same tokens; restart the "
        "generation workers, and keep vLLM's custom all-reduce off"
    )


def _states(part: Generated) -> dict[int, str]:
    """Describes each request by its checksum: whole sequences are too long to show."""
    states = {
        request: f"runs with {count} new tokens of checksum {crc:08x}" for request, count, crc in part.running.tolist()
    }
    for row in map(part.request, range(len(part))):
        crc = checksum([*row.tokens, *row.versions])
        states[row.request_id] = f"finished ({row.finish_reason}) with {len(row.tokens)} new tokens of checksum {crc:08x}"
    return states
