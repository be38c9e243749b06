"""Whole runs, SFT and then GRPO with real engines: a model that Megatron does not have, LoRA, and replayed experts."""

from pathlib import Path

import numpy as np
import pytest

from dagrl.config.file import load_config
from dagrl.run.train import train
from tests.integration.main_job import COMPLETIONS, GRPO, ROOT, SMALL, Metrics, steps_of, train as train_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("completions")]


@pytest.fixture
def completions(one_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the reward of `SMALL` records what it was asked."""
    pytest.importorskip("vllm")
    monkeypatch.setenv(COMPLETIONS, str(tmp_path / "completions"))


def assert_same_steps(found: list[Metrics], expected: list[Metrics]) -> None:
    steps = {row["step"]: row for row in found}
    for row in expected:
        for name in ("loss", "grad_norm", "reward/mean"):
            assert steps[row["step"]][name] == pytest.approx(row[name], rel=1e-6), (name, row["step"])


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


def test_gemma3_trains_and_resumes(tmp_path: Path) -> None:
    words = (*SMALL, *GEMMA3, PACKED, "checkpointing.export_hf=true", f"output_dir={tmp_path}")
    train(load_config(ROOT / GRPO, (*words, "name=whole")))
    train(load_config(ROOT / GRPO, (*words, "name=parts", "grpo.max_num_steps=3")))
    train(load_config(ROOT / GRPO, (*words, "name=parts", "checkpointing.resume=true")))
    whole, parts = (steps_of(tmp_path / name, "gen_kl_error") for name in ("whole", "parts"))
    assert len(whole) == 6 and all(row["gen_kl_error"] < 1e-6 for row in whole)
    assert_same_steps(parts, whole)
    assert "  # derived: Megatron trains llama" in (tmp_path / "whole" / "config.yaml").read_text()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "final_model")
    assert type(model).__name__ == "Gemma3ForCausalLM"


BACKENDS = {
    "megatron": (),
    "fsdp": ("policy.backend=fsdp", "policy.megatron_cfg={}", "policy.fsdp_cfg.data_parallel_size=2"),
}


def test_both_backends_take_the_same_steps_and_continue_each_others_exports(tmp_path: Path) -> None:
    words = (*SMALL, "grpo.max_num_steps=10", "checkpointing.save_period=100", f"output_dir={tmp_path}")
    first = (*words, "sft.max_num_steps=40", "checkpointing.export_hf=true")

    def steps(run: str, *more: str) -> list[Metrics]:
        train(load_config(ROOT / GRPO, (*more, f"name={run}")))
        return steps_of(tmp_path / run)

    ours, theirs = (steps(backend, *first, *keys) for backend, keys in BACKENDS.items())
    assert len(ours) == 50 and ours[-1]["stage"] == "grpo"
    for name, bound in (("loss", 1e-4), ("grad_norm", 1e-3), ("reward/mean", 0.0)):
        found, expected = ([row.get(name, 0.0) for row in rows] for rows in (theirs, ours))
        np.testing.assert_allclose(found, expected, rtol=bound, atol=1e-5, err_msg=name)
    last = (*words, "sft.max_num_steps=0", "grpo.max_num_steps=2", "policy.random_init=null")
    models = {backend: f"policy.model_name={tmp_path / backend / 'final_model'}" for backend in BACKENDS}
    for of, by in (("megatron", "fsdp"), ("fsdp", "megatron")):
        continued, own = (steps(f"{of}-{name}", *last, models[of], *BACKENDS[name]) for name in (by, of))
        np.testing.assert_allclose([row["loss"] for row in continued], [row["loss"] for row in own], atol=1e-5)
        assert all(row["gen_kl_error"] < 1e-6 for row in continued)


@pytest.mark.timeout(900)
def test_gemma3_trains_colocated(tmp_path: Path) -> None:
    """Train state leaves before an engine works, and returns: losses are those of separate workers."""
    words = (*SMALL, *GEMMA3, PACKED, "policy.precision=bfloat16", f"output_dir={tmp_path}")
    train(load_config(ROOT / GRPO, (*words, "name=apart")))
    colocated = "policy.generation.colocated={enabled: true, exchange: always}"
    train(load_config(ROOT / GRPO, (*words, colocated, "name=together")))
    apart, together = (steps_of(tmp_path / name, "gen_kl_error") for name in ("apart", "together"))
    assert len(together) == 6 and all(row["timing_s/exchange"] > 0 for row in together)
    assert_same_steps(together, apart)


@pytest.mark.parametrize("model", [("policy.megatron_cfg.data_parallel_size=1",), GEMMA3], ids=["megatron", "fsdp"])
@pytest.mark.parametrize("refit", ["merged", "adapters"])
def test_engines_generate_with_the_adapters_that_train(refit: str, model: tuple[str, ...], tmp_path: Path) -> None:
    peft = f"{{enabled: true, refit: {refit}, dim: 4, alpha: 8, target_modules: [q_proj, up_proj]}}"
    keys = "sft.lr=0.02", "policy.optimizer.lr=0.005"
    words = (*SMALL, *model, f"policy.peft={peft}", *keys, f"output_dir={tmp_path}", "name=lora")
    train(load_config(ROOT / GRPO, words))
    run = tmp_path / "lora"
    steps = steps_of(run, "gen_kl_error")
    assert len(steps) == 6
    assert all(row["gen_kl_error"] < 1e-5 for row in steps)
    assert all(row["policy/kl"] > 1e-3 for row in steps)  # the reference is the base model: before SFT
    from safetensors.torch import load_file

    adapters = load_file(run / "final_model" / "adapter" / "adapter_model.safetensors")
    exported = load_file(run / "final_model" / "model.safetensors")
    sent = exported if refit == "merged" else adapters
    assert {row["perf/refit_bytes"] for row in steps} == {sum(part.nbytes for part in sent.values())}


MODEL = (
    "{architectures: [Qwen3MoeForCausalLM], model_type: qwen3_moe, hidden_size: 64, intermediate_size: 128, "
    "moe_intermediate_size: 64, num_experts: 16, num_experts_per_tok: 2, norm_topk_prob: true, num_hidden_layers: 4, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32, max_position_embeddings: 64, rope_theta: 10000.0, "
    "tie_word_embeddings: false, initializer_range: 0.05}"
)


def runs_without_and_with_replay(directory: Path, *options: str) -> tuple[dict[bool, float], list[Metrics]]:
    """Trains twice. Returns the mean `gen_kl_error` without and with replay, and the steps of the run with it."""
    error = {}
    for replay in (False, True):
        run = train_command(
            GRPO, directory, f"replay_{replay}", *SMALL, *options, f"policy.router_replay={str(replay).lower()}"
        )
        steps = [row for row in run.metrics if "gen_kl_error" in row]
        assert len(steps) == 6
        error[replay] = float(np.mean([row["gen_kl_error"] for row in steps]))
    assert all(row["moe/replayed_tokens"] > 0.7 for row in steps)  # all but the last of each short sequence
    return error, steps


def test_generation_and_training_are_closer_with_the_same_experts(tmp_path: Path) -> None:
    options = ("policy.precision=bfloat16", f"policy.random_init.hf_config={MODEL}")
    error, steps = runs_without_and_with_replay(tmp_path, *options)
    assert all(0.9 < row["moe/replayed_agreement"] < 1 for row in steps)
    assert error[True] < 0.7 * error[False]
