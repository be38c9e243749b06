"""What the adapters refuse before they start anything on the actors of somebody else's group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagrl.embed import nemo_rl, verl
from dagrl.errors import GraphError


class FakeFleet:
    """Stands for the graphs on some actors."""

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
