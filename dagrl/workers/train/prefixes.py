"""Finds rows that begin with the same tokens, so that a packed row holds these once. Pure; needs only numpy.

    groups = prefix_groups(batch, least=1 / 3)        # the samples of a prompt, or the two answers of a preference
    units = divided(groups, lengths, budget)          # pieces of groups that fit a microbatch

Only neighbours are compared: rows of a prompt follow each other in every batch. The last token that all rows of a group
have in common is not shared. Its hidden state predicts the first token that differs, and each hidden state has one label.
Tokens whose labels are in the loss are not shared either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dagrl.runtime.shapes import Batch

MOST_LEVELS = 64  # of groups within groups that are tried


@dataclass(frozen=True)
class PrefixGroup:
    """Rows of a batch whose first `shared` tokens are computed once."""

    rows: tuple[int, ...]
    shared: int

    @property
    def saved(self) -> int:
        """Number of tokens that are not computed again."""
        return (len(self.rows) - 1) * self.shared


def prefix_groups(batch: Batch, least: float | None) -> list[PrefixGroup]:
    """Returns the groups that save the most tokens. Each row with tokens is in one, possibly alone.

    If they save less than `least` of the batch's tokens, or with None, every row is alone.
    """
    rows = np.flatnonzero(batch["lengths"])
    alone = [PrefixGroup((row,), 0) for row in rows.tolist()]
    if least is None:
        return alone
    runs = _best(_common_tokens(batch, rows).tolist(), 0, len(rows), 0)[1]
    groups = [PrefixGroup(tuple(rows[start:stop].tolist()), shared) for start, stop, shared in runs]
    return groups if sum(group.saved for group in groups) >= least * batch["lengths"].sum() else alone


def divided(groups: Sequence[PrefixGroup], lengths: npt.NDArray[np.int64], budget: int) -> Iterator[tuple[int, PrefixGroup]]:
    """Yields parts of the groups that fit `budget` tokens, each with the number of its group.

    Parts have up to half the budget, so that microbatches can be filled evenly; up to all of it if the prefix is long.
    """
    for number, group in enumerate(groups):
        limit = budget // 2 if 4 * group.shared <= budget else budget
        part, tokens = list[int](), group.shared
        for row in group.rows:
            own = int(lengths[row]) - group.shared
            if part and tokens + own > limit:
                yield number, PrefixGroup(tuple(part), group.shared)
                part, tokens = [], group.shared
            part.append(row)
            tokens += own
        yield number, PrefixGroup(tuple(part), group.shared)


def _common_tokens(batch: Batch, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Returns how many tokens each of these rows can share with the next one, [rows - 1]."""
    ends, places = batch["lengths"] - 1, np.arange(batch.tokens)
    if "loss_mask" in batch.fields:
        scored = (batch["loss_mask"] != 0) & (places > 0) & (places <= ends[:, None])
        ends = np.where(scored.any(1), scored.argmax(1) - 1, ends)
    ends = ends[rows]
    tokens = batch["tokens"][:, : ends.max(initial=0) + 2][rows]
    equal = np.pad(tokens[1:] == tokens[:-1], ((0, 0), (0, 1)))
    common: npt.NDArray[np.int64] = np.minimum(np.minimum(ends[1:], ends[:-1]), np.maximum(equal.argmin(1) - 1, 0))
    return common


Runs = list[tuple[int, int, int]]
"""Runs of rows: first, end, and the number of tokens that they share."""


def _best(common: Sequence[int], start: int, stop: int, level: int) -> tuple[int, Runs]:
    """Returns the runs of the rows `start` to `stop` that save the most tokens, and how many they save.

    They are one run, or separated where neighbours have the least in common.
    """
    if stop - start < 2:
        return 0, [(start, stop, 0)][: stop - start]
    between = common[start : stop - 1]
    least = min(between)
    saved = (stop - start - 1) * least
    if level == MOST_LEVELS:
        return saved, [(start, stop, least)]
    cuts = [start, *(start + 1 + place for place, tokens in enumerate(between) if tokens == least), stop]
    parts = [_best(common, first, end, level + 1) for first, end in pairwise(cuts)]
    apart = sum(part for part, _ in parts)
    if saved > apart:
        return saved, [(start, stop, least)]
    return apart, [run for _, runs in parts for run in runs]
