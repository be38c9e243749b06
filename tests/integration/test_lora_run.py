"""LoRA in a run: SFT, then GRPO with real engines, which get merged weights or the adapters in each refit."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.config.file import load_config
from dagrl.run.train import train
from dagrl.telemetry.record import read_metrics
from tests.integration.main_job import COMPLETIONS, GRPO, ROOT, SMALL
from tests.integration.test_async_grpo import one_cluster

__all__ = ["one_cluster"]  # a fixture


@pytest.mark.slow
@pytest.mark.parametrize("refit", ["merged", "adapters"])
def test_engines_generate_with_the_adapters_that_train(refit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv(COMPLETIONS, str(tmp_path / "completions"))
    peft = f"{{enabled: true, refit: {refit}, dim: 4, alpha: 8, use_rslora: true, target_modules: [q_proj, up_proj]}}"
    keys = "sft.lr=0.02", "policy.optimizer.lr=0.005", "policy.megatron_cfg.data_parallel_size=1"
    words = (*SMALL, f"policy.peft={peft}", *keys, f"output_dir={tmp_path}", "name=lora")
    train(load_config(ROOT / GRPO, words))
    run = tmp_path / "lora"
    steps = [row for row in read_metrics(run / "metrics.jsonl") if "gen_kl_error" in row]
    assert len(steps) == 6
    assert all(row["gen_kl_error"] < 1e-5 for row in steps)
    assert all(row["policy/kl"] > 1e-3 for row in steps)  # the reference is the base model: before SFT
    from safetensors.torch import load_file

    adapters = load_file(run / "final_model" / "adapter" / "adapter_model.safetensors")
    model = load_file(run / "final_model" / "model.safetensors")
    sent = model if refit == "merged" else adapters
    assert {row["perf/refit_bytes"] for row in steps} == {sum(part.nbytes for part in sent.values())}
