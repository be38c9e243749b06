"""Adapters of FSDP workers, against the peft package on the same model in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool
from tests.integration.test_fsdp_layouts import DP, EP, TP, Case
from tests.integration.test_megatron_layouts import UNCLIPPED, logprobs, train
from tests.integration.test_megatron_lora import ALPHA, DIM, Peft, learn

CASES = [
    (Case("gemma3", {DP: 2}, packed=True), ()),
    (Case("phi", {DP: 2}, {"activation_checkpointing": "full"}), ("dense", "fc2")),
    (Case("qwen3_tied"), ("v_proj", "layers.1.mlp.up_proj")),
    (Case("qwen3", {DP: 2, TP: 2}), ("q_proj", "o_proj", "layers.1.mlp.down_proj")),
]
IN_CI = "gemma3-dp2-packed"  # test_fsdp_layouts.py has the other models and settings


@pytest.mark.parametrize(
    ("case", "targets"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (str(one[0]) != IN_CI), id=str(one[0])) for one in CASES],
)
def test_steps_and_files_match_peft(
    case: Case,
    targets: tuple[str, ...],
    megatron_pool: MegatronPool,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, batch = tiny_model(case.model), reference.make_batch()
    peft = Peft(model, tmp_path / "theirs", targets)
    settings = {"enabled": True, "dim": DIM, "alpha": ALPHA, "target_modules": targets}
    config = case.config(model, optimizer=UNCLIPPED, peft={**settings, "adapter_path": str(peft.directory)})
    with torch.no_grad(), peft.model.disable_adapter():
        base = reference.hf_logprobs(peft.model, batch)[0].numpy()
    with megatron_pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        first = logprobs(group, batch)["logprobs"]
        np.testing.assert_allclose(first, reference.hf_logprobs(peft.model, batch)[0].detach().numpy(), atol=1e-5)
        group.call("snapshot_reference")
        losses = [train(group, batch)["loss"] for _ in range(reference.STEPS)]
        np.testing.assert_allclose(logprobs(group, batch, "reference")["logprobs"], base, atol=1e-5)
        last = logprobs(group, batch)["logprobs"]
        group.call("save_checkpoint", str(tmp_path / "checkpoint"))
        group.call("export_hf", str(tmp_path / "export"))
        went_on = train(group, batch)["loss"]
    expected, _ = learn(
        peft.parameters(), lambda: reference.sft_reference(reference.hf_logprobs(peft.model, batch)[0], batch), config
    )
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "export" / "adapter")
    for exported in (merged, adapted):
        with torch.no_grad():
            np.testing.assert_allclose(reference.hf_logprobs(exported, batch)[0].numpy(), last, atol=1e-5)
    other = Case(case.model, {DP: 4}).config(model, optimizer=UNCLIPPED, peft=settings)
    with megatron_pool.group(other.policy.train_layout, other, kind="fsdp") as group:
        group.call("load_checkpoint", str(tmp_path / "checkpoint"))
        assert train(group, batch)["loss"] == pytest.approx(went_on, abs=1e-5)


@pytest.mark.parametrize("layout", [{DP: 2}, pytest.param({TP: 2}, marks=pytest.mark.slow)], ids=str)
def test_a_refit_of_adapters_sends_both_factors_whole(
    layout: dict[str, int], megatron_pool: MegatronPool, tiny_model: Callable[[str], Path]
) -> None:
    batch, peft = reference.make_batch(), {"enabled": True, "dim": DIM, "alpha": ALPHA, "refit": "adapters"}
    config = Case("qwen3", layout).config(tiny_model("qwen3"), peft=peft, generation={"temperature": 1.0})
    with megatron_pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        train(group, batch)
        weights = reference.assemble(group.call("weights"))
        ranks = group.call("sent")
    assert len(ranks) == 2
    for sent in ranks:
        assert sent.keys() == {name for name in ranks[0] if ".lora_" in name} and len(sent) == 4 * 2 * 7
        for name, value in sent.items():
            stem, _, part = name.removesuffix(".weight").rpartition(".")
            scale = ALPHA / DIM if part == "lora_B" else 1.0
            np.testing.assert_array_equal(value, weights[f"{stem}.{part}.default.weight"] * np.float32(scale))


@pytest.mark.parametrize(
    ("model", "layout", "peft", "message"),
    [
        (
            "qwen3",
            {},
            {"target_modules": ("qkv",)},
            "target_modules has 'qkv', which no linear layer outside of experts is called",
        ),
        ("qwen3_moe", {DP: 2, EP: 2}, {}, "have no adapters next to expert parallelism"),
        (
            "qwen3_moe",
            {DP: 2},
            {"target_modules": ["down_proj"]},
            "down_proj', which no linear layer outside",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_an_error_before_workers_start(
    model: str, layout: dict[str, int], peft: dict[str, object], message: str, tiny_model: Callable[[str], Path]
) -> None:
    from dagrl.errors import ConfigError
    from dagrl.workers.fsdp import FsdpWorker
    from dagrl.workers.train.hf_load import read_hf_config

    config = Case(model, layout).config(tiny_model(model), peft={"enabled": True, **peft})
    with pytest.raises(ConfigError, match=message):
        FsdpWorker.check(config, read_hf_config(tiny_model(model)))
