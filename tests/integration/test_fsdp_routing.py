"""Replayed experts and load-balancing losses of FSDP workers, against a Hugging Face model in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from tests.integration.test_megatron_routing import BALANCE, Routers, load_model, loss_of, recorded_batch

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
def test_replayed_experts_match_the_record(
    case: Case, megatron_pool: MegatronPool, tiny_model: Callable[[str], Path]
) -> None:
    plain, model = reference.make_batch(), load_model(tiny_model(case.model))
    batch, forced = recorded_batch(plain, model.config.num_hidden_layers, model.config.num_local_experts, 2, dense=1)
    Routers(model, plain, forced)
    expected = reference.hf_logprobs(model, plain)[0]
    reference.sft_reference(expected, plain).backward()
    config = case.config(tiny_model(case.model), optimizer=UNCLIPPED, router_replay=True)
    with megatron_pool.group(config.policy.train_layout, config, kind="fsdp") as group:
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
def test_the_load_balancing_loss_is_that_of_switch(
    fsdp: dict[str, Any], megatron_pool: MegatronPool, tiny_model: Callable[[str], Path]
) -> None:
    batch, model = reference.make_batch(), load_model(tiny_model("qwen3_moe"))
    routers = Routers(model, batch)
    likelihood = reference.sft_reference(reference.hf_logprobs(model, batch)[0], batch)
    balance = loss_of(routers, batch, 2)
    (likelihood + BALANCE * balance).backward()
    case = Case("qwen3_moe", {DP: 2}, {"moe_aux_loss_coeff": BALANCE, **fsdp})
    config = case.config(tiny_model("qwen3_moe"), optimizer=UNCLIPPED)
    with megatron_pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        step = train(group, batch, warmup="whole")
        gradients = reference.assemble(group.call("gradients"))
    assert step["loss"] == pytest.approx(likelihood.item(), abs=1e-5)
    assert step["moe/load_balancing_loss"] == pytest.approx(balance.item() / len(routers.logits), rel=1e-5)
    assert_gradients(gradients, model)
