"""A reference policy of another family and size: its log-probabilities are Hugging Face's, in any layout."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import Json, RandomInit
from dagrl.config.file import load_config
from dagrl.run.model import character_tokenizer, write_random_model
from dagrl.run.train import train as train_run
from dagrl.runtime.layout import ParallelLayout
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool
from tests.integration.test_async_grpo import steps_of
from tests.integration.test_megatron_layouts import PACKED, logprobs, train


@pytest.mark.parametrize(
    ("teacher", "layout", "packing"),
    [
        pytest.param("qwen3_moe", ParallelLayout(dp=2, pp=2), {}, id="qwen3_moe-dp2pp2"),
        pytest.param("llama", ParallelLayout(tp=2, cp=2), PACKED, id="llama-tp2cp2-packed"),
    ],
)
def test_log_probabilities_match_the_teacher(
    teacher: str, layout: ParallelLayout, packing: dict[str, Any], megatron_pool: MegatronPool, tiny_models: dict[str, Path]
) -> None:
    from transformers import AutoModelForCausalLM

    directory = str(tiny_models[teacher])
    config = reference.make_config(tiny_models["qwen3"], reference_model_name=directory, **packing)
    batch = reference.make_batch(grpo=True)
    with megatron_pool.group(layout, config) as group:
        before = logprobs(group, batch)["logprobs"]
        group.call("snapshot_reference")
        train(group, batch, "policy")  # changes the policy, not the teacher
        found = logprobs(group, batch, "reference")["logprobs"]
        after = logprobs(group, batch)["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    expected = reference.hf_logprobs(model, batch)[0].detach().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert np.abs(after - before).max() > 1e-4 and np.abs(expected - before).max() > 0.1


QUICKSTART = Path(__file__).parents[2] / "examples" / "grpo_quickstart.yaml"


COMMON = ("sft.max_num_steps=0", "grpo.val_period=0", "grpo.max_val_samples=16", "cluster.num_cpus=2", "cluster.num_gpus=0")


def distillation(directory: Path, name: str, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """Distills a larger random teacher, written to `directory`, and returns the metrics of all steps."""
    description: dict[str, Json] = dict(load_config(QUICKSTART).policy.random_init.hf_config)  # type: ignore[union-attr]
    init = RandomInit(hf_config={**description, "num_hidden_layers": 3, "hidden_size": 96, "initializer_range": 0.1}, seed=5)
    if not (directory / "teacher").exists():
        write_random_model(init, character_tokenizer("0123456789+="), directory / "teacher")
    loss = ("loss_fn.name=distill", "loss_fn.reference_policy_kl_penalty=0", "policy.optimizer.lr=2e-3")
    run = (
        f"name={name}",
        f"output_dir={directory}",
        f"grpo.max_num_steps={steps}",
        "policy.megatron_cfg.data_parallel_size=1",
    )
    config = load_config(QUICKSTART, (*COMMON, *loss, *run, *overrides))
    train_run(config)
    return steps_of(config)


@pytest.mark.slow
def test_a_student_learns_from_a_larger_teacher(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher is random and peaked; the reverse KL of the student's samples falls."""
    monkeypatch.setattr("dagrl.run.fleet.ray_cluster", lambda *args, **options: nullcontext())  # joins the session's
    steps = distillation(tmp_path, "student", 16, f"policy.reference_model_name={tmp_path / 'teacher'}")
    gaps = [step["policy/reverse_kl"] for step in steps]
    assert len(gaps) == 16 and gaps[0] > 0.2, gaps
    assert np.mean(gaps[-4:]) < 0.75 * gaps[0], gaps


@pytest.mark.slow
def test_a_teacher_in_a_layout_of_its_own_teaches_the_same(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagrl.run.fleet.ray_cluster", lambda *args, **options: nullcontext())
    layout = "models.teacher.megatron_cfg.tensor_model_parallel_size=2"
    apart = distillation(tmp_path, "apart", 3, f"models.teacher.model_name={tmp_path / 'teacher'}", layout)
    here = distillation(tmp_path, "here", 3, f"policy.reference_model_name={tmp_path / 'teacher'}")
    for name in ("policy/reverse_kl", "loss", "grad_norm"):
        np.testing.assert_allclose([step[name] for step in apart], [step[name] for step in here], rtol=1e-3, err_msg=name)
