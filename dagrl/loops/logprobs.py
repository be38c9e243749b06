"""Log-probabilities of a step's samples, under the policy and the reference.

columns = logprobs_of(session, rows, known)            # of a whole batch: replays the rows that are not known yet

read_logprobs(session, submit_logprobs(session, rows)) # of some rows, begun here and read later
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dagrl.config import Config
from dagrl.config.settings import samples_per_step
from dagrl.loops.session import Session
from dagrl.loops.sft import train_buckets
from dagrl.replay import Replay
from dagrl.shapes import Array, Batch, Bucket

Columns = Mapping[str, Array]
"""`logprobs`, `entropy` and `reference_logprobs`: [rows, tokens] float32 of a batch, or [tokens] of one of its rows.

Those that are left out are 0.
"""

NAMES = ("logprobs", "entropy", "reference_logprobs")

Key = tuple[int, int]
"""A sample: its group's number, and its place in the group."""

CHUNKS = 8
"""A chunk has at least this part of a batch while more is to come: each has costs of its own, as swapping weights in."""


def logprobs_of(session: Session, rows: Batch, known: Sequence[Columns | None]) -> Columns:
    """The columns of `rows` (`tokens`, `lengths`); those of rows that are `known` (None: not) are not computed again.

    With `policy.offload_optimizer_for_logprob` the optimizer's state is away until they are there; it left with the first
    of a step, whether that is here or was early.
    """
    missing = [row for row, found in enumerate(known) if found is None]
    if len(missing) == rows.rows:
        begin_logprobs(session)
    columns = columns_of(known, rows)
    if missing:
        batch = rows.select(missing)
        found = {name: session.replay(name, batch) for name in logprob_phases(session.config)}
        for name, values in _columns(batch, found).items():
            columns[name][missing, : values.shape[1]] = values  # the longest of the missing may be shorter
    end_logprobs(session)
    return columns


def columns_of(known: Sequence[Columns | None], rows: Batch) -> dict[str, Array]:
    """The columns of `rows`, as far as they are `known`; 0 elsewhere."""
    columns = {name: np.zeros(rows["tokens"].shape, np.float32) for name in NAMES}
    for row, found in enumerate(known):
        for name, values in (found or {}).items():
            width = min(len(values), rows.tokens)  # a chunk may be wider than the batch: padding
            columns[name][row, :width] = values[:width]
    return columns


def begin_logprobs(session: Session) -> None:
    """To be called before the first log-probabilities of a step."""
    if session.config.policy.offload_optimizer_for_logprob and logprob_phases(session.config):
        session.replay("logprob_inference_prep", session.step)


def end_logprobs(session: Session) -> None:
    """To be called after the last of them."""
    if session.config.policy.offload_optimizer_for_logprob and logprob_phases(session.config):
        session.replay("training_prep", session.step)


def submit_logprobs(session: Session, rows: Batch) -> Mapping[str, Replay]:
    """Start to compute the columns of `rows`; the replays that do so, by phase."""
    return {name: session.submit(name, rows) for name in logprob_phases(session.config)}


def read_logprobs(session: Session, rows: Batch, replays: Mapping[str, Replay]) -> Columns:
    """The columns of rows submitted before, once they are there."""
    return _columns(rows, {name: session.collect(name, replay)[0] for name, replay in replays.items()})


def least_chunk(config: Config) -> int:
    """Rows of a chunk while more of the batch is to come."""
    return max(1, samples_per_step(config) // CHUNKS)


def chunk_buckets(config: Config, early: bool) -> tuple[Bucket, ...]:
    """Buckets of a whole batch; where parts of it come `early`, of the least chunk, twice that and so on too."""
    samples = samples_per_step(config)
    rows = least_chunk(config) if early else samples
    buckets: tuple[Bucket, ...] = ()
    while rows < samples:
        buckets += train_buckets(config, rows)
        rows *= 2
    return tuple(dict.fromkeys((*buckets, *train_buckets(config, samples))))


def logprob_phases(config: Config) -> tuple[str, ...]:
    """The phases that compute what a step needs of them."""
    policy = () if config.loss_fn.force_on_policy_ratio else ("logprobs",)
    return (*policy, "reference_logprobs") if config.loss_fn.reference_policy_kl_penalty else policy


def _columns(rows: Batch, found: Mapping[str, Batch]) -> Columns:
    """Columns of `rows` from the result of each phase."""
    width = next(iter(found.values())).tokens if found else rows.tokens
    nothing = np.zeros((rows.rows, width), np.float32)
    columns = {name: nothing for name in NAMES}
    if "logprobs" in found:
        columns |= {"logprobs": found["logprobs"]["logprobs"], "entropy": found["logprobs"]["entropy"]}
    if "reference_logprobs" in found:
        columns["reference_logprobs"] = found["reference_logprobs"]["logprobs"]
    return columns
