"""LoRA in a run: SFT, then GRPO with real engines, which get merged weights or the adapters in each refit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dagrl.config import RandomInit
from dagrl.config.file import load_config
from dagrl.run.model import character_tokenizer, write_random_model
from dagrl.run.train import train
from dagrl.telemetry.record import read_metrics
from tests.integration.main_job import COMPLETIONS, GRPO, ROOT, SMALL
from tests.integration.test_async_grpo import one_cluster

__all__ = ["one_cluster"]  # a fixture

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


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


@pytest.mark.slow
def test_adapters_of_peft_become_a_checkpoint_and_a_model(tmp_path: Path) -> None:
    """`dagrl export` of what PEFT wrote, and of that checkpoint: PEFT's own merged model, and its adapters."""
    peft = pytest.importorskip("peft")
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base, theirs, run, model = (tmp_path / name for name in ("base", "theirs", "run", "model"))
    write_random_model(RandomInit(hf_config=TINY), character_tokenizer("0123456789"), base)
    settings = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "up_proj"]}
    lora = peft.LoraConfig(**settings, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    adapted.save_pretrained(theirs)
    pairs = [(str(theirs), str(run)), (f"{run}/checkpoints/step_00000000", str(model))]
    code = f"from dagrl.cli.main import main\nfor one, other in {pairs}: assert main(['export', one, '-o', other]) == 0"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=280)
    found, wanted = (load_file(path / "adapter_model.safetensors") for path in (model / "adapter", theirs))
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    merged, weights = adapted.merge_and_unload().state_dict(), load_file(model / "model.safetensors")
    assert all(torch.allclose(weights[key], merged[key], atol=1e-6) for key in weights)
