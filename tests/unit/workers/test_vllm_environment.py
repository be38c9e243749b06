"""The GPU of a generation process, by Ray's assignment and the process's visible GPUs."""

from __future__ import annotations

import pytest

from dagrl.config import Config
from dagrl.machine import VISIBLE, device_index
from dagrl.workers.vllm.environment import check_head_size, show_host_gpus
from tests.families import FAMILIES


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


def test_latent_attention_has_no_head_size_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3's hidden size by its heads is 56, which is the size of nothing."""
    monkeypatch.setattr("dagrl.workers.vllm.environment.gpu_count", lambda: 0)
    config = Config.model_validate({"name": "t", "algorithm": "sft", "data": {"path": "x"}, "policy": {"model_name": "x"}})
    check_head_size(config, {**FAMILIES["deepseek_v3"], "hidden_size": 7168, "num_attention_heads": 128})
