"""FSDP workers on GPUs: float32 and bfloat16 against plain torch, every attention implementation, memory, and NCCL."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.config import FsdpConfig
from dagrl.workers.fsdp import copies
from dagrl.workers.fsdp.model import prepare_layer
from tests.gpu import needs_gpus
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool
from tests.integration.test_fsdp_layouts import CP, DP, EP, REPLICAS, TP, Case, plain_gradients, plain_run, run_case
from tests.integration.test_megatron_layouts import UNCLIPPED, group_batch, logprobs, run_group, train
from tests.integration.test_megatron_lora import ALPHA, Peft, learn
from tests.unit.workers.test_fsdp_model import tiny

CASES = [
    Case("qwen3"),
    Case("gemma3", packed=True),
    Case("phi", packed=True),
    Case("qwen3", {}, {"activation_checkpointing": "offloaded"}, packed=True),
    Case("qwen3", {}, {"activation_checkpointing": "selective"}),
    Case("qwen3", {}, {"cpu_offload": True}),
    Case("qwen3_moe", packed=True),
    pytest.param(Case("gemma3", {DP: 2}, packed=True), marks=needs_gpus(2)),
    pytest.param(Case("qwen3", {DP: 2, REPLICAS: 2}), marks=needs_gpus(2)),
    pytest.param(Case("qwen3_tied", {TP: 2}, packed=True), marks=needs_gpus(2)),
    pytest.param(Case("gemma3", {CP: 2}, packed=True), marks=needs_gpus(2)),
    pytest.param(Case("qwen3", {CP: 2}, packed=True), marks=needs_gpus(2)),
    pytest.param(Case("qwen3_moe", {DP: 2, EP: 2}, packed=True), marks=needs_gpus(2)),
    pytest.param(Case("qwen3", {DP: 2}, {"cpu_offload": True}), marks=needs_gpus(2)),
    pytest.param(Case("gemma3", {DP: 4, REPLICAS: 2}, packed=True), marks=needs_gpus(4)),
    pytest.param(Case("qwen3", {DP: 2, TP: 2}, packed=True), marks=needs_gpus(4)),
    pytest.param(Case("qwen3", {CP: 4}, packed=True), marks=needs_gpus(4)),
    pytest.param(Case("qwen3_moe", {DP: 2, CP: 2, EP: 4}, packed=True), marks=needs_gpus(4)),
    pytest.param(Case("qwen3_tied", {DP: 2, TP: 2, CP: 2}, packed=True), marks=needs_gpus(8)),
    pytest.param(Case("qwen3_many_experts", {DP: 8, EP: 8}, packed=True), marks=needs_gpus(8)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_is_close_to_the_cpu(case: Case, pool: MegatronPool, models: dict[str, Path]) -> None:
    model = models[case.model]
    reference.assert_near_float32(replace(run_case(pool, case, model), gradients={}), plain_run(model))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_is_close_to_float32(case: Case, pool: MegatronPool, models: dict[str, Path]) -> None:
    model = models[case.model]
    found = replace(run_case(pool, case, model, precision="bfloat16"), gradients={})
    assert not reference.beyond_bfloat16(found, plain_run(model))


@pytest.mark.parametrize(("precision", "difference"), [("float32", 1e-4), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("layout", [{}, pytest.param({DP: 2}, marks=needs_gpus(2))], ids=str)
def test_adapters_of_experts_are_close_to_peft(
    layout: dict[str, int], precision: str, difference: float, pool: MegatronPool, models: dict[str, Path], tmp_path: Path
) -> None:
    targets, experts = ("q_proj",), ("experts.gate_up_proj", "experts.down_proj")
    model, batch = models["qwen3_moe"], reference.make_batch()
    peft = Peft(model, tmp_path, targets, experts, dim=8)  # grouped products in bfloat16 take multiples of 8
    settings = {"enabled": True, "dim": 8, "alpha": ALPHA, "target_modules": targets, "target_parameters": experts}
    adapters, case = {**settings, "adapter_path": str(peft.directory)}, Case("qwen3_moe", layout, packed=True)
    config = case.config(model, optimizer=UNCLIPPED, precision=precision, peft=adapters)
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        losses = [train(group, batch)["loss"] for _ in range(reference.STEPS)]
    expected, _ = learn(
        peft.parameters(), lambda: reference.sft_reference(reference.hf_logprobs(peft.model, batch)[0], batch), config
    )
    np.testing.assert_allclose(losses, expected, atol=difference)


ATTENTION = ["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_packed_rows_are_apart(name: str, attention: str, pool: MegatronPool, models: dict[str, Path]) -> None:
    """With windows shorter than the sequences for Gemma 3. Workers refuse rows whose sequences see each other."""
    packages = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    if attention in packages and importlib.util.find_spec(packages[attention]) is None:
        pytest.skip(f"{packages[attention]} is not installed")
    case = Case(name, {}, {"attn_implementation": attention}, packed=True)
    found = replace(run_case(pool, case, models[name], precision="bfloat16"), gradients={})
    assert not reference.beyond_bfloat16(found, plain_run(models[name]))


SHARED = [
    Case("qwen3"),
    Case("qwen3", {}, {"torch_compile": True, "activation_checkpointing": "selective"}),
    Case("gemma3", {}, {"torch_compile": True}),  # windows
    Case("gemma3", {}, {"attn_implementation": "sdpa"}),
    Case("qwen3_moe", {}, {"activation_checkpointing": "full"}),
    pytest.param(Case("qwen3", {TP: 2}, {"torch_compile": True}), marks=needs_gpus(2)),
]


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_shared_prefixes_are_as_close_to_float32_as_whole_sequences(
    case: Case, pool: MegatronPool, models: dict[str, Path]
) -> None:
    batch, model, found = group_batch(), models[case.model], dict[bool, tuple[float, float]]()
    config = case.config(model, optimizer=UNCLIPPED)
    truth = reference.train_reference(model, batch, config, reference.sft_reference, steps=1)
    gradients = plain_gradients(model, groups=True)
    inside = np.arange(batch.tokens) < batch["lengths"][:, None]
    for shared in (False, True):
        packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96, "shared_prefix": shared}
        config = case.config(model, precision="bfloat16", optimizer=UNCLIPPED, sequence_packing=packing)
        with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
            run = run_group(group, batch)
        assert (run["saved"] > 0.1) == shared
        off = float(np.abs(run["logprobs"] - truth.logprobs * inside).mean())
        found[shared] = reference.gradient_error(run["gradients"], gradients), off
    assert found[False][0] < 0.05, found
    assert found[True][0] < 1.2 * found[False][0] + 1e-3 and found[True][1] < 1.2 * found[False][1] + 1e-3, found


@pytest.mark.parametrize("recomputes", ["none", "full", "selective", "offloaded"])
def test_layers_compile(recomputes: str, pool: MegatronPool, models: dict[str, Path]) -> None:
    case = Case("qwen3", {}, {"torch_compile": True, "activation_checkpointing": recomputes}, packed=recomputes != "none")
    found = replace(run_case(pool, case, models["qwen3"], precision="bfloat16"), gradients={})
    assert not reference.beyond_bfloat16(found, plain_run(models["qwen3"]))


@pytest.mark.parametrize("compiles", [False, True])
def test_saved_tensors_return_from_the_host(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "LEAST_BYTES", 1)
    plain, model, before = tiny("qwen3").cuda(), tiny("qwen3").cuda(), None
    for layer in model.model.layers:
        before = prepare_layer(layer, FsdpConfig(activation_checkpointing="offloaded"), before, compiles=compiles)
    for step in range(3):
        tokens = torch.randint(0, 200, (8, 512), device="cuda")
        for each in (plain, model):
            each(input_ids=tokens, use_cache=False).logits.square().mean().backward()
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=f"{name}, step {step}")


@pytest.mark.parametrize("where", ["host", "device"])
def test_state_moves_and_returns(where: str, pool: MegatronPool, models: dict[str, Path]) -> None:
    """Weights, optimizer and reference policy are bit-equal after a move to the host and back."""
    parts: Any = ("weights", "gradients", "optimizer")
    case, batch = Case("gemma3", packed=True), reference.make_batch()
    config = case.config(models["gemma3"], precision="bfloat16", reference_weights=where)
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        group.call("snapshot_reference")
        train(group, batch)
        weights = reference.assemble(group.call("weights"))
        reference_before, before = (logprobs(group, batch, name)["logprobs"] for name in ("reference", "policy"))
        group.call("offload", parts)
        assert group.call("resident_bytes") == [dict.fromkeys(parts, 0)]
        group.call("reload", parts)
        for name, value in reference.assemble(group.call("weights")).items():
            np.testing.assert_array_equal(value, weights[name], err_msg=name)
        np.testing.assert_array_equal(logprobs(group, batch, "policy")["logprobs"], before)
        np.testing.assert_array_equal(logprobs(group, batch, "reference")["logprobs"], reference_before)
        assert train(group, batch)["loss"] < 6
