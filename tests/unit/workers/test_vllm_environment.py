"""The GPU of a generation process, by Ray's assignment and the process's visible GPUs."""

from __future__ import annotations

import pytest

from dagrl.machine import VISIBLE
from dagrl.workers.vllm.environment import device_index, show_host_gpus


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [([], None, None), (["5"], None, 5), (["5"], "4,5", 1), (["0"], "", 0), (["GPU-b"], "GPU-a,GPU-b", 1)],
)
def test_index_of_the_assigned_gpu(assigned: list[str], visible: str | None, index: int | None) -> None:
    assert device_index(assigned, visible) == index


@pytest.mark.parametrize(("before", "after"), [({}, "0,1,2"), ({VISIBLE: ""}, "0,1,2"), ({VISIBLE: "1"}, "1")])
def test_all_gpus_of_the_host_are_visible_unless_some_were_chosen(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: str
) -> None:
    monkeypatch.setattr("dagrl.workers.vllm.environment.gpu_count", lambda: 3)
    environment = dict(before)
    show_host_gpus(environment)
    assert environment[VISIBLE] == after
