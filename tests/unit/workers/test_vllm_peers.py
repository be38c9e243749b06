"""Tensor-parallel ranks detect which request they disagree on. Two threads over Gloo act as two engines."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from dagrl.errors import RunError
from dagrl.workers.vllm.engine import Peers

Ended = list[tuple[int, list[int]]]
"""The comparisons of one rank: engine steps, and the requests that ended in them."""


def outcome(rank: int, store: HashStore, ended: Ended, timeout_s: float, found_out: threading.Event) -> str:
    peers = Peers(ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)), 4, timeout_s)
    try:
        for step, requests in ended:
            peers.compare(step, requests)
    except RunError as error:
        found_out.set()
        return str(error)
    if timeout_s < 1:  # this rank would run on
        assert found_out.wait(20), "the other waits as long as its group does"
    return ""


def outcomes(one: Ended, other: Ended, timeout_s: float = 30.0) -> list[str]:
    store, found_out = HashStore(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(outcome, rank, store, ended, timeout_s, found_out) for rank, ended in enumerate((one, other))]
        return [future.result() for future in running]


def test_ranks_that_end_the_same_requests_continue() -> None:
    same: Ended = [(1, [7]), (4, [3, -1, 9]), (8, [])]
    assert outcomes(same, [(step, requests[::-1]) for step, requests in same]) == ["", ""]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ([3, 7], [3], r"request 7 ended in engine step 2 on rank \[0\] of 2 only"),
        ([3], [5], r"request 3 ended in engine step 2 on rank \[0\]"),
        ([], [8], r"request 8 ended in engine step 2 on rank \[1\]"),
        ([3, 5, 7, 9], [3, 5, 7], r"request 9 ended in engine step 2 on rank \[0\]"),  # as many as can end in a step
    ],
)
def test_all_ranks_name_the_request_they_disagree_on(one: list[int], other: list[int], message: str) -> None:
    for found in outcomes([(1, [1]), (2, one)], [(1, [1]), (2, other)]):
        assert re.search(message, found)


def test_waiting_for_a_rank_that_runs_on_ends_at_the_deadline() -> None:
    waited, ran_on = outcomes([(2, [7])], [], timeout_s=0.2)
    assert (
        "requests [7] ended on rank 0 in engine step 2, but not on all other ranks within timeouts.collective_s = 0.2 s"
        in waited
    )
    assert not ran_on
