"""Parts of a start: measured in workers, joined over ranks by the slowest."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from dagrl.runtime.start_parts import StartParts, parts_text, started_parts


class Worker:
    def __init__(self) -> None:
        self.start_parts = StartParts()


def test_parts_are_measured_also_when_they_fail() -> None:
    worker = Worker()
    for _ in range(2):
        with pytest.raises(OSError), worker.start_parts.part("weights"):
            time.sleep(0.02)
            raise OSError
    assert started_parts(worker)["weights"] >= 0.04
    assert started_parts(object()) == {}


def test_a_part_is_not_counted_in_the_one_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.0, 3.0, 7.0))
    monkeypatch.setattr("dagrl.runtime.start_parts.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    parts = StartParts()
    with parts.part("kernels"):
        parts.part("CUDA graphs")(lambda: None)()
    assert parts.seconds == {"CUDA graphs": 2.0, "kernels": 5.0}


def test_each_part_is_that_of_its_slowest_rank() -> None:
    ranks = [{"imports": 6.0, "weights": 1.0}, {"imports": 7.0, "weights": 0.5}]
    assert parts_text(10.0, ranks) == "10.0 s (imports 7.0, weights 1.0, other 2.0)"
    assert parts_text(1.25, [{}]) == "1.2 s"


def test_parts_that_overlap_add_up_to_the_whole() -> None:
    ranks = [{"waiting for training's memory": 8.0, "imports": 7.0, "weights": 1.0}]
    assert parts_text(10.0, ranks) == "10.0 s (waiting for training's memory 8.0, imports 7.0, weights 1.0, overlap -6.0)"
