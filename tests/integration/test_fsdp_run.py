"""A model that Megatron does not have, in a run: SFT, then GRPO with real engines, resumed and exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dagrl.config.file import load_config
from dagrl.run.train import train
from dagrl.telemetry.record import read_metrics
from tests.integration.main_job import COMPLETIONS, GRPO, ROOT, SMALL
from tests.integration.test_async_grpo import one_cluster

__all__ = ["one_cluster"]  # a fixture

GEMMA3 = (
    *(
        f"policy.random_init.hf_config.{key}={value}"
        for key, value in {
            "architectures": "[Gemma3ForCausalLM]",
            "model_type": "gemma3_text",
            "sliding_window": 4,
            "query_pre_attn_scalar": 32,
            "layer_types": "[sliding_attention, full_attention]",
            "tie_word_embeddings": "true",
        }.items()
    ),
    "policy.megatron_cfg.data_parallel_size=1",
    "policy.fsdp_cfg.data_parallel_size=2",
)
PACKED = "policy.sequence_packing={enabled: true, train_mb_tokens: 256, logprob_mb_tokens: 512}"


@pytest.mark.slow
def test_gemma3_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv(COMPLETIONS, str(tmp_path / "completions"))
    words = (*SMALL, *GEMMA3, PACKED, "checkpointing.export_hf=true", f"output_dir={tmp_path}")
    train(load_config(ROOT / GRPO, (*words, "name=whole")))
    train(load_config(ROOT / GRPO, (*words, "name=parts", "grpo.max_num_steps=3")))
    train(load_config(ROOT / GRPO, (*words, "name=parts", "checkpointing.resume=true")))
    whole, parts = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "parts"))
    steps = [row for row in whole if "gen_kl_error" in row]
    assert len(steps) == 6
    assert all(row["gen_kl_error"] < 1e-6 for row in steps)
    again = {row["step"]: row for row in parts if "gen_kl_error" in row}
    for row in steps:
        for name in ("loss", "grad_norm", "reward/mean"):
            np.testing.assert_allclose(again[row["step"]][name], row[name], rtol=1e-6, err_msg=f"{name} {row['step']}")
    assert "  # derived: Megatron trains llama" in (tmp_path / "whole" / "config.yaml").read_text()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "final_model")
    assert type(model).__name__ == "Gemma3ForCausalLM"
