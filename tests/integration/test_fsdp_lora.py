"""Adapters, replayed experts and load balancing of FSDP workers, against peft and Hugging Face models in one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import get_total_norm

from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool
from tests.integration.test_fsdp_layouts import CP, DP, EP, TP, Case
from tests.integration.test_megatron_layouts import UNCLIPPED, logprobs, train
from tests.integration.test_megatron_lora import ALPHA, DIM, Peft, learn
from tests.integration.test_megatron_routing import BALANCE, Routers, load_model, loss_of, recorded_batch

CASES = [
    (Case("gemma3", {DP: 2}, packed=True), ()),
    (Case("phi", {DP: 2}, {"activation_checkpointing": "full"}), ("dense", "fc2")),
    (Case("qwen3_tied"), ("v_proj", "layers.1.mlp.up_proj")),
    (Case("qwen3", {DP: 2, TP: 2}), ("q_proj", "o_proj", "layers.1.mlp.down_proj")),
    (Case("qwen3_moe", {DP: 2}, packed=True), ("q_proj",), ("experts.gate_up_proj", "experts.down_proj")),
    (Case("qwen3_moe_mixed", {DP: 2, CP: 2}), ("v_proj",), ("layers.2.mlp.experts.down_proj",)),
]
IN_CI = "gemma3-dp2-packed"  # test_fsdp_layouts.py has the other models and settings


@pytest.mark.parametrize(
    ("case", "targets", "experts"),
    [
        pytest.param(case, targets, *(experts or [()]), marks=[pytest.mark.slow] * (str(case) != IN_CI), id=str(case))
        for case, targets, *experts in CASES
    ],
)
def test_steps_and_files_match_peft(
    case: Case, targets: tuple[str, ...], experts: tuple[str, ...], pool: MegatronPool, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, batch = pool.models[case.model], reference.make_batch()
    peft = Peft(model, tmp_path / "theirs", targets, experts)
    settings = {"enabled": True, "dim": DIM, "alpha": ALPHA, "target_modules": targets, "target_parameters": experts}
    config = case.config(model, optimizer=UNCLIPPED, peft={**settings, "adapter_path": str(peft.directory)})
    with torch.no_grad(), peft.model.disable_adapter():
        base = reference.hf_logprobs(peft.model, batch)[0].numpy()
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
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
    with pool.group(other.policy.train_layout, other, kind="fsdp") as group:
        group.call("load_checkpoint", str(tmp_path / "checkpoint"))
        assert train(group, batch)["loss"] == pytest.approx(went_on, abs=1e-5)


@pytest.mark.parametrize("layout", [{DP: 2}, pytest.param({TP: 2}, marks=pytest.mark.slow)], ids=str)
def test_a_refit_of_adapters_sends_both_factors_whole(layout: dict[str, int], pool: MegatronPool) -> None:
    batch, peft = reference.make_batch(), {"enabled": True, "dim": DIM, "alpha": ALPHA, "refit": "adapters"}
    config = Case("qwen3", layout).config(pool.models["qwen3"], peft=peft, generation={"temperature": 1.0})
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
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
        ("qwen3_moe", {TP: 2}, {"target_parameters": ["down_proj"]}, "split over tensor-parallel ranks have no adapters"),
        ("qwen3_moe", {}, {"target_parameters": ["down_proj"], "refit": "adapters"}, "have none of experts; set .*=merged"),
        ("qwen3_moe", {}, {"target_parameters": ["down_proj"], "dim": 6}, "take multiples of 4, such as 8"),
        (
            "qwen3_moe",
            {},
            {"target_parameters": ["up_proj"]},
            "no weight of experts .* expected experts.gate_up_proj, experts.d",
        ),
        ("qwen3", {}, {"target_parameters": ["down_proj"]}, "the model has no experts that can have adapters"),
        ("qwen3_moe", {DP: 2}, {"target_modules": ["down_proj"]}, "down_proj', which no linear layer outside"),
    ],
)
def test_adapters_that_do_not_fit_are_an_error_before_workers_start(
    model: str, layout: dict[str, int], peft: dict[str, object], message: str, tiny_models: dict[str, Path]
) -> None:
    from dagrl.errors import ConfigError
    from dagrl.workers.fsdp import FsdpWorker
    from dagrl.workers.train.hf_load import read_hf_config

    config = Case(model, layout).config(tiny_models[model], peft={"enabled": True, **peft})
    with pytest.raises(ConfigError, match=message):
        FsdpWorker.check(config, read_hf_config(tiny_models[model]))


FULL = {"activation_checkpointing": "full"}
REPLAYS = [
    Case("qwen3_moe_mixed", {DP: 2}, FULL, packed=True),
    pytest.param(Case("qwen3_moe_mixed", {TP: 2, EP: 2}), marks=pytest.mark.slow),
    pytest.param(Case("qwen3_moe_mixed", {CP: 2}, packed=True), marks=pytest.mark.slow),
]


def assert_gradients(found: Mapping[str, Any], model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max()) or 1.0
        np.testing.assert_allclose(found[name] / scale, parameter.grad / scale, atol=2e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize("case", REPLAYS, ids=str)
def test_replayed_experts_match_the_record(case: Case, pool: MegatronPool) -> None:
    plain, model = reference.make_batch(), load_model(pool.models[case.model])
    batch, forced = recorded_batch(plain, model.config.num_hidden_layers, model.config.num_local_experts, 2, dense=1)
    Routers(model, plain, forced)
    expected = reference.hf_logprobs(model, plain)[0]
    reference.sft_reference(expected, plain).backward()
    config = case.config(pool.models[case.model], optimizer=UNCLIPPED, router_replay=True)
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        found = logprobs(group, batch)
        step = train(group, batch)
        after = logprobs(group, batch)
    np.testing.assert_allclose(found["logprobs"], expected.detach().numpy(), atol=1e-5, rtol=0)
    assert step["loss"] == pytest.approx(reference.sft_reference(expected, plain).item(), abs=1e-5)
    used = (forced[:, :, 2, 0] >= 0).sum() / plain["lengths"].sum()
    assert step["moe/replayed_tokens"] == pytest.approx(used)
    assert 0 < step["moe/replayed_agreement"] < 1
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert step["grad_norm"] == pytest.approx(float(get_total_norm(gradients)), rel=1e-4)
    assert np.abs(after["logprobs"] - found["logprobs"]).max() > 1e-4


@pytest.mark.parametrize("fsdp", [{CP: 2}, pytest.param(FULL, marks=pytest.mark.slow)], ids=["split rows", "recomputed"])
def test_the_load_balancing_loss_is_that_of_switch(fsdp: dict[str, Any], pool: MegatronPool) -> None:
    batch, model = reference.make_batch(), load_model(pool.models["qwen3_moe"])
    routers = Routers(model, batch)
    likelihood = reference.sft_reference(reference.hf_logprobs(model, batch)[0], batch)
    balance = loss_of(routers, batch, 2)
    (likelihood + BALANCE * balance).backward()
    case = Case("qwen3_moe", {DP: 2}, {"moe_aux_loss_coeff": BALANCE, **fsdp})
    config = case.config(pool.models["qwen3_moe"], optimizer=UNCLIPPED)
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        step = train(group, batch, warmup="whole")
        gradients = reference.assemble(group.call("gradients"))
    assert step["loss"] == pytest.approx(likelihood.item(), abs=1e-5)
    assert step["moe/load_balancing_loss"] == pytest.approx(balance.item() / len(routers.logits), rel=1e-5)
    assert_gradients(gradients, model)
