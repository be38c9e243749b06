"""Refits of LoRA adapters alone into vLLM's slot on a GPU: of models with and without experts, eager and under CUDA graphs.

The reference is transformers in float32 with the adapters merged into the same bfloat16 weights. bfloat16 differs by 0.01
to 0.03 in the mean, other adapters by more than 0.5.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dagrl.config import Config
from dagrl.rl.generation import FinishedRequest
from tests.gpu.test_vllm_worker import (
    LONG_PROMPT,
    PROMPTS,
    SHAPES,
    Engine,
    batch,
    gpu_config,
    make_gpu_checkpoint,
    mean_difference,
    started,
)
from tests.integration import vllm_calls
from tests.integration.test_train_adapters import ALPHA, DIM
from tests.integration.vllm_ranks import requests

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": []}
CASES = {
    "dense, eager": ("qwen3", True, 0.05),
    "dense, graphs": ("qwen3", False, 0.05),
    "experts, graphs": ("qwen3_moe", False, 0.15),  # bfloat16 routes some tokens to other experts
}


@dataclass
class Adapted:
    """An engine, the base model in float32, and two sets of adapters."""

    engine: Engine
    config: Config
    base: Any
    adapters: list[dict[str, torch.Tensor]]
    close: float

    def write(self, number: int, version: int) -> None:
        self.engine.write(number, version)

    def difference(self, number: int, rows: Sequence[FinishedRequest], prompts: Sequence[Sequence[int]]) -> float:
        """Returns the mean difference of the rows' log-probabilities from those with one set of adapters."""
        parameters = {name: part.cuda() for name, part in merged_parameters(self.base, self.adapters[number]).items()}
        model = self.base.cuda().eval()
        found = mean_difference(
            lambda tokens: torch.func.functional_call(model, parameters, (tokens.cuda(),)).logits[0], rows, prompts
        )
        self.base.cpu()
        return found

    def check(self, number: int, rows: Sequence[FinishedRequest], prompts: Sequence[Sequence[int]]) -> None:
        assert self.difference(number, rows, prompts) < self.close
        assert self.difference(1 - number, rows, prompts) > 0.5


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def adapted(request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    from transformers import AutoModelForCausalLM

    model_type, eager, close = request.param
    root = tmp_path_factory.mktemp("lora")
    make_gpu_checkpoint(root / "base", 0, model_type, **SHAPES["tiny"], **(EXPERTS if model_type == "qwen3_moe" else {}))
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    adapters = [make_adapters(base, root / str(seed), seed) for seed in range(2)]
    config = with_adapters(gpu_config(root / "base", eager))
    with started([root / str(seed) / "refit" for seed in range(2)], config) as engine:
        yield Adapted(engine, config, base, adapters, close)


def make_adapters(base: Any, directory: Path, seed: int) -> dict[str, torch.Tensor]:
    """Writes, in `refit`, what a refit sends of random adapters in bfloat16. Returns these as they are after rounding."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    rounded = {}
    for name, weight in base.named_parameters():
        if name.endswith("_proj.weight"):
            module, (rows, columns) = name.removesuffix(".weight"), weight.shape
            rounded[f"{module}.lora_A.weight"] = (0.1 * torch.randn(DIM, columns)).bfloat16()
            rounded[f"{module}.lora_B.weight"] = (0.05 * torch.randn(rows, DIM)).bfloat16()
    sent = {name: part * (ALPHA / DIM) if "lora_B" in name else part for name, part in rounded.items()}
    (directory / "refit").mkdir(parents=True)
    save_file(sent, directory / "refit" / "model.safetensors")
    return {name: part.float() for name, part in rounded.items()}


def merged_parameters(base: Any, adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    merged = {name: part.detach() for name, part in base.named_parameters()}
    for name, a in adapters.items():
        module, ending, _ = name.partition(".lora_A.weight")
        if ending:
            merged[f"{module}.weight"] = merged[f"{module}.weight"] + ALPHA / DIM * adapters[f"{module}.lora_B.weight"] @ a
    return merged


def with_adapters(config: Config) -> Config:
    content = config.model_dump()
    content["policy"]["peft"] |= {"enabled": True, "refit": "adapters", "dim": DIM, "alpha": ALPHA}
    return Config.model_validate(content)


def test_log_probabilities_match_merged_weights(adapted: Adapted) -> None:
    for version, number in enumerate((0, 1, 0)):
        adapted.write(number, version)
        adapted.check(number, adapted.engine.run(batch(1 + 100 * version, greedy=False)), PROMPTS)


def test_running_sequences_continue_with_the_new_adapters(adapted: Adapted) -> None:
    long = [LONG_PROMPT[start:] + LONG_PROMPT[:start] for start in range(0, len(LONG_PROMPT), 25)]
    adapted.write(0, 10)
    adapted.engine.run(requests(range(900, 900 + len(long)), long, new=2))  # their blocks are cached with the old adapters
    adapted.engine.quantum(batch(1, new=12, steps=5))
    adapted.write(1, 11)
    rows = adapted.engine.run(requests(range(950, 950 + len(long)), long, new=8))
    running, later = rows[: len(PROMPTS)], rows[len(PROMPTS) :]
    assert {tuple(row.versions) for row in running} == {(10,) * 5 + (11,) * 7}
    heads = [FinishedRequest(row.request_id, row.tokens[:5], row.logprobs[:5], row.versions[:5], "") for row in running]
    adapted.check(0, heads, PROMPTS)
    adapted.check(1, later, long)


def test_a_sleeping_engine_keeps_base_weights_and_adapters(adapted: Adapted) -> None:
    adapted.write(1, 20)
    addresses = adapted.engine.group.call_function(vllm_calls.memory_addresses)
    adapted.engine.group.call("sleep", 1)
    adapted.engine.group.call("wake_up")
    assert adapted.engine.group.call_function(vllm_calls.memory_addresses) == addresses
    adapted.check(1, adapted.engine.run(batch(1, greedy=False)), PROMPTS)
