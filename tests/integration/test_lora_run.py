"""LoRA from the command: SFT, then GRPO with real engines, which get merged weights or the adapters in each refit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.main_job import GRPO, SMALL, train


@pytest.mark.parametrize("refit", [pytest.param("merged", marks=pytest.mark.slow), "adapters"])
def test_engines_generate_with_the_adapters_that_train(refit: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    peft = f"{{enabled: true, refit: {refit}, dim: 4, alpha: 8, use_rslora: true, target_modules: [q_proj, up_proj]}}"
    keys = "sft.lr=0.02", "policy.megatron_cfg.optimizer.lr=0.005", "policy.megatron_cfg.data_parallel_size=1"
    run = train(GRPO, tmp_path, "lora", *SMALL, f"policy.megatron_cfg.peft={peft}", *keys)
    steps = [row for row in run.metrics if "gen_kl_error" in row]
    assert len(steps) == 6
    assert all(row["gen_kl_error"] < 1e-5 for row in steps)
    assert all(row["policy/kl"] > 1e-3 for row in steps)  # the reference is the base model: before SFT
    from safetensors.torch import load_file

    adapters = load_file(run.directory / "final_model" / "adapter" / "adapter_model.safetensors")
    model = load_file(run.directory / "final_model" / "model.safetensors")
    sent = model if refit == "merged" else adapters
    assert {row["perf/refit_bytes"] for row in steps} == {sum(part.nbytes for part in sent.values())}
