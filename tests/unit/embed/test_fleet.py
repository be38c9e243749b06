"""How a fleet's calls are shared out over the graphs of its hosts."""

from __future__ import annotations

import pytest

from dagrl.embed.fleet import PER_WORKER, together
from dagrl.runtime.executors.node import Take
from dagrl.runtime.graph import Arguments
from dagrl.runtime.split import share_out


@pytest.mark.parametrize(
    ("nodes", "size"), [("aaaa", 4), ("aabb", 2), ("aaabbb", 3), ("aaaabb", 2), ("aaabb", 1), ("abab", 1), ("a", 1)]
)
def test_graphs_span_the_workers_of_one_host(nodes: str, size: int) -> None:
    assert together(nodes) == size


def test_every_worker_takes_its_own_call_and_equal_calls_are_pickled_once() -> None:
    common, own = Arguments(("batch",)), Arguments((), {"rank": 3})
    inputs, join = share_out("train", PER_WORKER, [common, None, common, own], 2)
    taken = [Take(0).of(value, position) for value in inputs for position in range(2)]
    assert taken == [common, None, common, own]
    assert inputs[0].parts[0] is inputs[1].parts[0]  # type: ignore[attr-defined]
    assert join([[1, None], [2, 3]]) == [1, None, 2, 3]
