"""`policy.deterministic` on a GPU: a request's log-probabilities are the same bits in any batch, and a step the same again.

.venv/bin/pytest tests/gpu/test_deterministic.py     about 4 minutes on one GPU of compute capability 9.0
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.run.certify import certify, record
from tests.gpu.test_vllm_worker import PROMPTS, SHAPES, gpu_config, make_gpu_checkpoint, started
from tests.integration.vllm_ranks import requests

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.usefixtures("one_cluster"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_a_request_has_the_same_bits_in_any_batch(eager: bool, tmp_path: Path) -> None:
    model = make_gpu_checkpoint(tmp_path / "model", 0, **SHAPES["0.6B"])
    content: dict[str, Any] = gpu_config(model, eager).model_dump()
    content["policy"]["deterministic"] = True
    with started([model], Config.model_validate(content)) as engine:
        alone = [engine.run(requests([row], [prompt], new=32))[0] for row, prompt in enumerate(PROMPTS)]
        together = engine.run(requests(list(range(len(PROMPTS))), PROMPTS, new=32))
        crowd = engine.run(requests(list(range(48)), [PROMPTS[row % 8] for row in range(48)], new=32))[: len(PROMPTS)]
    for batch in (together, crowd):
        assert [row.tokens for row in batch] == [row.tokens for row in alone]
        assert [row.logprobs for row in batch] == [row.logprobs for row in alone]


def test_steps_are_executed_again_bit_for_bit(tmp_path: Path) -> None:
    """The quickstart's task in bfloat16, with every value of the steps, and the weights after them."""
    overrides = [
        *("policy.deterministic=true", "policy.precision=bfloat16"),
        *("policy.megatron_cfg.data_parallel_size=1", "policy.generation.colocated.enabled=true"),
        "sft.max_num_steps=60",
        "grpo.max_num_steps=2",
    ]
    record(load_config(ROOT / "examples" / "grpo_quickstart.yaml", overrides), tmp_path / "golden", steps=60)
    found = {report.phase: report.verdict for report in certify(tmp_path / "golden").phases}
    assert found.keys() >= {"demonstration_step", "generate", "logprobs", "train_step", "weights after"}
    assert set(found.values()) == {"equal"}
