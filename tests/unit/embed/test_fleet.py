"""How a fleet's calls are shared out over the graphs of its hosts."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagrl.embed import nemo_rl, verl
from dagrl.embed.fleet import PER_WORKER, together
from dagrl.errors import GraphError
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


class FakeFleet:
    def __init__(self, actors: object, methods: object, *, deadline_s: float, max_bytes: int, **options: object) -> None:
        self.limits, self.closed = (deadline_s, max_bytes), False

    def close(self) -> None:
        self.closed = True


def test_groups_on_the_same_verl_actors_have_the_same_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "Fleet", FakeFleet)
    monkeypatch.setattr(verl, "register_reducers", lambda: None)
    actors = [SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "a"))]
    first = verl._fleet_of(actors, 60.0, 1 << 20)
    assert verl._fleet_of(actors, 60.0, 1 << 20) is first
    with pytest.raises(GraphError, match=r"deadline_s=60 and max_bytes=1048576; give the same, or close\(\) that group"):
        verl._fleet_of(actors, 60.0, 1 << 21)
    assert not first.closed, "the first group goes on"
    first.close()
    assert verl._fleet_of(actors, 60.0, 1 << 21) is not first


def test_a_nemo_rl_group_is_accelerated_once() -> None:
    group = nemo_rl.AcceleratedGroup(SimpleNamespace(), cast(Any, None))
    with pytest.raises(GraphError, match="accelerated already"):
        nemo_rl.accelerate(group, ["train"])
