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
from tests.integration.test_train_adapters import EXPERTS, Peft, adapters_of
from tests.integration.train_cases import (
    Case,
    fsdp,
    group_batch,
    logprobs,
    plain_group,
    plain_torch,
    run_case,
    run_group,
    shared_prefix,
    train,
)
from tests.integration.train_pool import WorkerPool
from tests.unit.workers.test_fsdp_model import tiny

CASES = [
    fsdp("qwen3"),
    fsdp("gemma3", packed=True),
    fsdp("phi", packed=True),
    fsdp("qwen3", section={"activation_checkpointing": "offloaded"}, packed=True),
    fsdp("qwen3", section={"activation_checkpointing": "selective"}),
    fsdp("qwen3", section={"cpu_offload": True}),
    fsdp("qwen3_moe", packed=True),
    pytest.param(fsdp("gemma3", dp=2, packed=True), marks=needs_gpus(2)),
    pytest.param(fsdp("qwen3", dp=2, replicas=2), marks=needs_gpus(2)),
    pytest.param(fsdp("qwen3_tied", tp=2, packed=True), marks=needs_gpus(2)),
    pytest.param(fsdp("gemma3", cp=2, packed=True), marks=needs_gpus(2)),
    pytest.param(fsdp("qwen3", cp=2, packed=True), marks=needs_gpus(2)),
    pytest.param(fsdp("qwen3_moe", dp=2, ep=2, packed=True), marks=needs_gpus(2)),
    pytest.param(fsdp("qwen3", dp=2, section={"cpu_offload": True}), marks=needs_gpus(2)),
    pytest.param(fsdp("gemma3", dp=4, replicas=2, packed=True), marks=needs_gpus(4)),
    pytest.param(fsdp("qwen3", dp=2, tp=2, packed=True), marks=needs_gpus(4)),
    pytest.param(fsdp("qwen3", cp=4, packed=True), marks=needs_gpus(4)),
    pytest.param(fsdp("qwen3_moe", dp=2, cp=2, ep=4, packed=True), marks=needs_gpus(4)),
    pytest.param(fsdp("qwen3_tied", dp=2, tp=2, cp=2, packed=True), marks=needs_gpus(8)),
    pytest.param(fsdp("qwen3_many_experts", dp=8, ep=8, packed=True), marks=needs_gpus(8)),
]


def check_bfloat16(pool: WorkerPool, case: Case) -> None:
    found = replace(run_case(pool, case, precision="bfloat16"), gradients={})
    assert not reference.beyond_bfloat16(found, plain_torch(pool.models[case.model]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_is_close_to_the_cpu(case: Case, pool: WorkerPool) -> None:
    reference.assert_near_float32(replace(run_case(pool, case), gradients={}), plain_torch(pool.models[case.model]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_is_close_to_float32(case: Case, pool: WorkerPool) -> None:
    check_bfloat16(pool, case)


@pytest.mark.parametrize(("precision", "difference"), [("float32", 1e-4), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=needs_gpus(2))])
def test_adapters_of_experts_are_close_to_peft(
    dp: int, precision: str, difference: float, pool: WorkerPool, tmp_path: Path
) -> None:
    case, targets, batch = fsdp("qwen3_moe", packed=True, dp=dp), ("q_proj",), reference.make_batch()
    model = pool.models[case.model]
    peft = Peft(model, tmp_path, targets, EXPERTS, dim=8)  # grouped products in bfloat16 take multiples of 8
    keys = {**adapters_of(peft.directory, targets, dim=8, target_parameters=EXPERTS), "precision": precision}
    with case.group(pool, **keys) as group:
        losses = [train(group, batch)["loss"] for _ in range(reference.STEPS)]
    expected, _ = peft.learn(batch, case.config(model, **keys))
    np.testing.assert_allclose(losses, expected, atol=difference)


ATTENTION = ["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_packed_rows_are_apart(name: str, attention: str, pool: WorkerPool) -> None:
    """With windows shorter than the sequences for Gemma 3. Workers refuse rows whose sequences see each other."""
    packages = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    if attention in packages and importlib.util.find_spec(packages[attention]) is None:
        pytest.skip(f"{packages[attention]} is not installed")
    check_bfloat16(pool, fsdp(name, section={"attn_implementation": attention}, packed=True))


SHARED = [
    fsdp("qwen3"),
    fsdp("qwen3", section={"torch_compile": True, "activation_checkpointing": "selective"}),
    fsdp("gemma3", section={"torch_compile": True}),  # windows
    fsdp("gemma3", section={"attn_implementation": "sdpa"}),
    fsdp("qwen3_moe", section={"activation_checkpointing": "full"}),
    pytest.param(fsdp("qwen3", section={"torch_compile": True}, tp=2), marks=needs_gpus(2)),
]


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_shared_prefixes_are_as_close_to_float32_as_whole_sequences(case: Case, pool: WorkerPool) -> None:
    truth, found = plain_group(pool.models[case.model]), dict[bool, tuple[float, float]]()
    for shared in (False, True):
        with case.group(pool, precision="bfloat16", **shared_prefix(shared)) as group:
            run, saved = run_group(group, group_batch())
        assert (saved > 0.1) == shared
        off = float(np.abs(run.logprobs - truth.logprobs).mean())
        found[shared] = reference.gradient_error(run.gradients, truth.gradients), off
    assert found[False][0] < 0.05, found
    assert found[True][0] < 1.2 * found[False][0] + 1e-3 and found[True][1] < 1.2 * found[False][1] + 1e-3, found


@pytest.mark.parametrize("recomputes", ["none", "full", "selective", "offloaded"])
def test_layers_compile(recomputes: str, pool: WorkerPool) -> None:
    section = {"torch_compile": True, "activation_checkpointing": recomputes}
    check_bfloat16(pool, fsdp("qwen3", section=section, packed=recomputes != "none"))


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
def test_state_moves_and_returns(where: str, pool: WorkerPool) -> None:
    """Weights, optimizer and reference policy are bit-equal after a move to the host and back."""
    parts: Any = ("weights", "gradients", "optimizer")
    case, batch = fsdp("gemma3", packed=True), reference.make_batch()
    with case.group(pool, precision="bfloat16", reference_weights=where) as group:
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
