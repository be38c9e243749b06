"""How long readers spin before they sleep."""

from __future__ import annotations

import math

import pytest

from dagrl.runtime.edges import futex
from dagrl.runtime.edges.futex import Patience

LEAST, MOST = 0.02, 2.0


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(futex.time, "perf_counter", lambda: clock.now)
    for name, value in {"LOST_CORE_S": 1e-3, "GIVE_WAY_S": (LEAST, MOST), "SOON_S": 0.02, "LONG_SPIN_S": 0.02}.items():
        monkeypatch.setattr(futex, name, value)
    monkeypatch.setattr(Patience, "_give_way_until", 0.0)
    monkeypatch.setattr(Patience, "_give_way_s", LEAST)
    return clock


def look(patience: Patience, clock: Clock, seconds: float) -> float:
    before, clock.now = clock.now, clock.now + seconds
    return patience.looked(before)


def came(patience: Patience, clock: Clock, after: float) -> float:
    clock.now += after
    patience.came(clock.now - after)
    return patience.seconds


def test_a_reader_whose_messages_come_soon_spins_for_long(clock: Clock) -> None:
    patience = Patience()
    assert patience.seconds == futex.SHORT_SPIN_S
    assert came(patience, clock, after=0.001) == futex.LONG_SPIN_S
    assert came(patience, clock, after=0.5) == futex.SHORT_SPIN_S
    assert came(patience, clock, after=0.001) == futex.LONG_SPIN_S
    patience.lose()
    assert patience.seconds == futex.SHORT_SPIN_S


def test_losing_the_core_stops_spinning_on_all_edges_of_the_process(clock: Clock) -> None:
    one, other = Patience(), Patience()
    assert look(one, clock, 1e-5) == clock.now
    assert look(one, clock, 0.003) == math.inf
    assert came(other, clock, after=0.001) == futex.SHORT_SPIN_S
    assert came(other, clock, after=LEAST) == futex.LONG_SPIN_S


def test_a_core_lost_repeatedly_is_given_up_for_longer(clock: Clock) -> None:
    patience, given = Patience(), []
    for _ in range(10):
        look(patience, clock, 0.003)
        given.append(Patience._give_way_until - clock.now)
        clock.now = Patience._give_way_until + 0.001
    assert given == pytest.approx([LEAST * 2**turn for turn in range(7)] + [MOST] * 3)
    clock.now += 2 * MOST  # undisturbed for as long as it gave way
    look(patience, clock, 0.003)
    assert Patience._give_way_until - clock.now == pytest.approx(LEAST)
