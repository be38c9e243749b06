"""The GPU of a generation process, by Ray's assignment and the process's visible GPUs, and the CUDA graphs of its engine."""

from __future__ import annotations

from typing import Any

import pytest

from dagrl.config import Config
from dagrl.machine import VISIBLE, device_index
from dagrl.workers.vllm.environment import show_host_gpus
from dagrl.workers.vllm.launch import _compilation, capture_sizes


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


@pytest.mark.parametrize("most", [1, 8, 100, 128, 500, 4096])
def test_captured_steps_have_little_padding(most: int) -> None:
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(2 * most, 512) and len(sizes) < 27
    for tokens in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= tokens)
        assert padded - tokens < max(8, tokens / 4)
    assert most in sizes or most > 512


def test_a_chosen_compilation_keeps_its_sizes() -> None:
    def compilation(on_gpu: bool = False, **chosen: Any) -> dict[str, Any]:
        generation = {"vllm_cfg": {"enforce_eager": False, "max_num_seqs": 8}, "vllm_kwargs": chosen}
        values = {"name": "x", "algorithm": "grpo", "data": {}, "policy": {"generation": generation}}
        return _compilation(Config.model_validate(values), on_gpu)

    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    assert compilation() == {"compilation_config": sizes}
    assert compilation(compilation_config={"cudagraph_mode": "FULL"}) == {
        "compilation_config": {**sizes, "cudagraph_mode": "FULL"}
    }
    chosen = {"max_cudagraph_capture_size": 4, "inductor_compile_config": {"combo_kernels": False}}
    assert compilation(on_gpu=True, compilation_config=chosen) == {"compilation_config": chosen}
    untimed = {"combo_kernels": True, "benchmark_combo_kernel": False}
    assert compilation(on_gpu=True) == {"compilation_config": {**sizes, "inductor_compile_config": untimed}}
    assert compilation(compilation_config=3) == {}
