"""Packing of finished requests, and the check that the ranks of a shard agree."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from dagrl.errors import RunError
from dagrl.rl.generation import (
    FIRST_QUANTUM,
    FinishedRequest,
    Generated,
    RequestProgress,
    checksum,
    merge_generated,
    pack_generated,
    quantum_steps,
)
from dagrl.runtime.shapes import Batch

ROWS = [
    FinishedRequest(9, [4, 5, 6], [-1.0, -2.0, -0.5], [0, 0, 1], "length"),
    FinishedRequest(2, [7], [-0.25], [1], "stop"),
]
RUNNING = [RequestProgress(5, 2, checksum([8, 9])), RequestProgress(3), RequestProgress(4, 1, checksum([8]))]


def generated(**changes: object) -> Generated:
    """Returns the rows with the first one changed."""
    return pack_generated([dataclasses.replace(ROWS[0], **changes), ROWS[1]], RUNNING, engine_steps=4)


def test_rows_are_sorted_by_id() -> None:
    packed = generated()
    assert packed.request_ids.tolist() == [2, 9]
    assert packed.tokens.tolist() == [[7, 0, 0], [4, 5, 6]]
    assert [packed.request(row) for row in range(len(packed))] == [ROWS[1], ROWS[0]]
    assert (packed.unfinished, packed.engine_steps, packed.finish_reasons) == (3, 4, ("stop", "length"))


def test_nothing_finished() -> None:
    packed = pack_generated([], RUNNING, 4)
    assert (len(packed), packed.tokens.shape, packed.unfinished) == (0, (0, 0), 3)
    assert merge_generated([packed, pack_generated([], RUNNING[::-1], 4)]) is packed


def test_equal_parts_merge_in_a_tree_and_survive_pickling() -> None:
    parts = [pickle.loads(pickle.dumps(generated())) for _ in range(4)]  # noqa: S301
    merged = merge_generated([merge_generated(parts[:2]), merge_generated(parts[2:])])
    assert merged.digest == generated().digest
    np.testing.assert_array_equal(merged.tokens, parts[0].tokens)


def test_logprobs_may_differ_in_their_last_bits() -> None:
    assert merge_generated([generated(), generated(logprobs=[-1.0, -2.0, -0.50000006])])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (generated(tokens=[4, 5, 7]), r"9 finished \(length\) with 3 new .*, but finished .*\(part 2 of 3 against part 0\)"),
        (generated(tokens=[4, 5], logprobs=[-1.0, -2.0], versions=[0, 0]), r"request 9 .* 3 new .* 2 new"),
        (generated(versions=[0, 1, 1]), "request 9 finished"),
        (generated(finish_reason="stop"), r"request 9 finished \(length\) .* finished \(stop\)"),
        (generated(request_id=8), r"request 8 is absent, but finished"),
        (pack_generated(ROWS, RUNNING, engine_steps=3), "the engine steps are 4 and 3"),
        (
            pack_generated(ROWS, [RequestProgress(5, 2, checksum([8, 7])), *RUNNING[1:]], 4),
            "request 5 runs with 2 new .*, but runs with 2 new",
        ),
        (
            pack_generated(ROWS, [*RUNNING[:2], RequestProgress(4, 2, checksum([8]))], 4),
            "request 4 runs with 1 new .*, but runs with 2 new",
        ),
        (pack_generated(ROWS, RUNNING[:2], 4), "request 4 runs with .*, but is absent"),
    ],
)
def test_errors_name_the_request_that_differs(other: Generated, message: str) -> None:
    with pytest.raises(RunError, match=message):
        merge_generated([generated(), generated(), other])


def test_checksums_continue() -> None:
    assert checksum([4, 5], checksum([1, 2, 3])) == checksum([1, 2, 3, 4, 5]) != checksum([1, 2, 3, 5, 4])


def test_engine_steps_of_all_shards_or_per_shard() -> None:
    rows = Batch({"lengths": np.zeros(0, np.int64)})
    assert [quantum_steps(rows.with_scalars(engine_steps=5), shard) for shard in range(3)] == [5, 5, 5]
    assert [quantum_steps(rows.with_scalars(engine_steps=(1, 2, 0)), shard) for shard in range(3)] == [1, 2, 0]
    assert quantum_steps(rows, 1) == FIRST_QUANTUM
