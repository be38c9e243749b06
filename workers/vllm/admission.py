"""Admission: how many requests an engine runs at once, so that its KV cache holds them until they end.

vLLM starts a request as soon as its prompt fits into the KV cache. Then all sequences grow, the cache is full before most of
them have ended, and vLLM preempts the latest ones and computes them again later. While a request waits although a slot is
free, its scheduler also runs for every step (`Bursts`). Here a request waits until the cache is expected to hold everything
that runs with it, and a standard deviation more.

How long completions get is estimated from those that have ended and those that run, by the product-limit estimator (Kaplan
and Meier 1958, doi:10.1080/01621459.1958.10501452). Before one has ended, all run to their limit of tokens. When sequences
turn out longer, vLLM preempts, as without this module. All ranks of an engine decide the same: from the same requests, in
integers and exact operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from dagrl.workers.vllm import features

Numbers = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

REMEMBERED = 4096
"""Completions whose lengths the estimate is made from."""

CANDIDATES = 512
"""Most requests that are admitted at a time."""

HORIZONS = 32
"""Points in time at which the cache is looked at, up to the end of the longest request."""

UNIT = 1024
"""Parts of a block in which expected blocks are counted."""


@dataclass(frozen=True)
class Sequences:
    """Requests: tokens of the prompt, generated so far, and at most to generate, [n] each.

    `shared` [n] are the whole blocks of the prompt, which all requests of one prompt share; `prefixes` [n] are those that no
    earlier request has.
    """

    prompts: Numbers
    made: Numbers
    limits: Numbers
    shared: Numbers
    prefixes: Numbers

    def expected_blocks(self, alive: Shares, horizons: Numbers, block: int) -> tuple[Numbers, Numbers]:
        """Returns what each request is expected to hold `horizons` [h] steps later, without `shared`, and its variance.

        Two arrays [n, h], in `UNIT` and its square. `alive` is what `survival` returns, `block` the tokens of a block.
        """
        then = self.made[:, None] + horizons
        runs = then < self.limits[:, None]
        shares = alive[np.minimum(then, len(alive) - 1)] / alive[self.made][:, None]
        parts: Numbers = np.rint(shares * UNIT).astype(np.int64) * runs
        held = -(-(self.prompts[:, None] + then) // block) - self.shared[:, None]
        return parts * held, parts * (UNIT - parts) * held**2


def survival(ended: Numbers, running: Numbers, longest: int) -> Shares:
    """Returns the estimated share of completions with more than t tokens, for t from 0 to `longest`.

    `ended` [n] are the lengths of completions that ended by themselves; `running` [m] those of others, so far.
    """
    ends = np.bincount(np.minimum(ended, longest), minlength=longest + 1)
    seen = ends + np.bincount(np.minimum(running, longest), minlength=longest + 1)
    at_least = seen[::-1].cumsum()[::-1]
    # A running request of t tokens has not ended at t, so it is never all that have t who end.
    shares: Shares = np.cumprod(1 - ends / np.maximum(at_least, 1))
    return shares


class Admission:
    """Wraps the scheduler of an engine in this process, outside of `Bursts`, and sets how many requests it may run."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._schedule = scheduler, scheduler.schedule
        self._limit = features.running_limit(scheduler)
        self._slots: int = getattr(scheduler, self._limit)
        self._longest = int(scheduler.max_model_len)
        self._block = int(scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._blocks = int(scheduler.kv_cache_config.num_blocks) - 1  # vLLM keeps one empty
        self._ended: deque[tuple[int, bool]] = deque(maxlen=REMEMBERED)
        self._changes = 0
        self._refused: tuple[int, int] | None = None  # changes, and running requests, when no request fitted
        scheduler.schedule = self.schedule

    def ended(self, tokens: int, by_itself: bool) -> None:
        """Counts a completion; `by_itself`: not at its limit of tokens."""
        self._ended.append((tokens, by_itself))
        self._changes += 1

    def schedule(self, *args: Any) -> Any:
        """Schedules a step, in which as many requests start as the cache holds to their ends."""
        setattr(self._scheduler, self._limit, self._allowed())
        return self._schedule(*args)

    def _allowed(self) -> int:
        running, waiting = self._scheduler.running, self._scheduler.waiting
        free = self._slots - len(running)
        if free <= 0 or not waiting:
            return self._slots
        state, admitted = (self._changes, len(running)), 0
        if state != self._refused:
            admitted = self._admitted(running, list(islice(waiting, min(free, CANDIDATES))))
            self._refused = None if admitted else state
        return max(1, len(running) + admitted)

    def _admitted(self, running: Sequence[Any], waiting: Sequence[Any]) -> int:
        """Returns with how many of the `waiting` requests, in order, the cache holds everything."""
        prompts: set[Any] = set()
        these, those = self._sequences(running, prompts), self._sequences(waiting, prompts)
        lengths = np.array([tokens for tokens, _ in self._ended], np.int64)
        complete = np.array([by_itself for _, by_itself in self._ended], bool)
        so_far = np.concatenate([lengths[~complete], these.made, those.made])
        alive = survival(lengths[complete], so_far, self._longest)
        left = max(int((one.limits - one.made).max(initial=1)) for one in (these, those))
        horizons = np.arange(1, HORIZONS + 1) * left // HORIZONS
        expected = [one.expected_blocks(alive, horizons - 1, self._block) for one in (these, those)]
        (held, spread), (more, more_spread) = expected
        prefixes = these.prefixes.sum() + those.prefixes.cumsum()
        mean = held.sum(0) + more.cumsum(0) + UNIT * prefixes[:, None]
        deviation = np.sqrt(spread.sum(0) + more_spread.cumsum(0))
        fits = (mean + deviation <= UNIT * self._blocks).all(1)
        return int(fits.cumprod().sum())

    def _sequences(self, requests: Sequence[Any], prompts: set[Any]) -> Sequences:
        """`prompts` are those of earlier requests; these are added."""
        rows = []
        for request in requests:
            prompt, hashes = int(request.num_prompt_tokens), request.block_hashes
            shared = min(prompt // self._block, len(hashes))
            prefix = hashes[shared - 1] if shared else None
            new = 0 if prefix in prompts else shared
            prompts.add(prefix)
            limit = min(request.max_tokens, self._longest - prompt)
            rows.append((prompt, request.num_output_tokens, limit, shared, new))
        return Sequences(*np.array(rows, np.int64).reshape(-1, 5).T)
