"""Checkpoints and exports of FSDP workers, reference policies, critics and teachers; and the other backend's results."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dagrl.files import verify_files
from dagrl.workers.train.offload import STATE_PARTS
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool, WorkerError
from tests.integration.test_fsdp_layouts import CP, DP, EP, REPLICAS, TP, Case
from tests.integration.test_megatron_layouts import UNCLIPPED, logprobs, train
from tests.integration.test_megatron_values import own_values, plain_torch, value_batch

SCHEDULE = {"lr_decay_style": "cosine", "lr_decay_iters": 8, "lr_warmup_iters": 2}
RESUMED = [
    (
        Case("gemma3", {DP: 2}),
        [Case("gemma3", {TP: 2}), Case("gemma3", {CP: 2}), Case("gemma3", {DP: 4, REPLICAS: 2}, packed=True)],
    ),
    (Case("qwen3_moe", {DP: 2, EP: 2}), [Case("qwen3_moe")]),
]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("first", "others"), RESUMED, ids=["gemma3", "experts"])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    first: Case, others: list[Case], pool: MegatronPool, tmp_path: Path
) -> None:
    batch, directory, model = reference.make_batch(), str(tmp_path / "step-2"), pool.models[first.model]
    config = first.config(model, scheduler=SCHEDULE)
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        for _ in range(2):
            train(group, batch)
        train(group, batch.with_scalars(global_valid_tokens=1e-45))  # gradients beyond all numbers: skipped
        group.call("snapshot_reference")
        files = group.call("save_checkpoint", directory)
        weights = reference.assemble(group.call("weights"))
        went_on = [train(group, batch) for _ in range(2)]
        kept = logprobs(group, batch, "reference")["logprobs"]
        assert np.abs(kept - logprobs(group, batch)["logprobs"]).max() > 1e-3
    verify_files(Path(directory), {name: entry for part in files for name, entry in part.items()})
    for other in (first, *others):
        config = other.config(model, scheduler=SCHEDULE)
        with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
            group.call("load_checkpoint", directory)
            for name, value in reference.assemble(group.call("weights")).items():
                np.testing.assert_array_equal(value, weights[name], err_msg=name)
            resumed = [train(group, batch) for _ in range(2)]
            again = logprobs(group, batch, "reference")["logprobs"]
        if other is first:
            assert resumed == went_on  # bit for bit
        np.testing.assert_allclose(again, kept, atol=1e-5)
        for found, expected in zip(resumed, went_on, strict=True):
            assert (found["lr"], found["skipped_steps"]) == (expected["lr"], 1)
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("case", [Case("gemma3", {DP: 2}, packed=True), Case("qwen3_moe", {DP: 2, TP: 2, EP: 2})], ids=str)
def test_training_continues_unchanged_after_offloading(case: Case, pool: MegatronPool) -> None:
    batch, config = reference.make_batch(), case.config(pool.models[case.model], precision="bfloat16")
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        train(group, batch)
        undisturbed = [logprobs(group, batch)["logprobs"], train(group, batch), train(group, batch)]
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        train(group, batch)
        resident, weights = group.call("resident_bytes"), reference.assemble(group.call("weights"))
        group.call("offload", STATE_PARTS)
        assert [parts["optimizer"] for parts in group.call("resident_bytes")] == [0] * len(resident)
        with pytest.raises(WorkerError, match="needs the weights, which are offloaded"):
            logprobs(group, batch)
        group.call("reload", STATE_PARTS)
        assert group.call("resident_bytes") == resident and all(parts["optimizer"] > 0 for parts in resident)
        for name, value in reference.assemble(group.call("weights")).items():
            np.testing.assert_array_equal(value, weights[name], err_msg=name)
        group.call("prepare_for_logprobs", 1)
        assert [parts["optimizer"] for parts in group.call("resident_bytes")] == [0] * len(resident)
        disturbed = [logprobs(group, batch)["logprobs"]]
        group.call("prepare_for_training", 1)
        disturbed += [train(group, batch), train(group, batch)]
    np.testing.assert_array_equal(disturbed[0], undisturbed[0])
    assert disturbed[1:] == undisturbed[1:]  # bit for bit


@pytest.mark.parametrize(
    "case", [Case("gemma3", {DP: 2, CP: 2}), Case("qwen3_moe", {DP: 2, TP: 2, EP: 2}), Case("phi", {TP: 2})], ids=str
)
def test_transformers_loads_an_export_with_equal_logits(case: Case, pool: MegatronPool, tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model = pool.models[case.model]
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        (model / name).write_text(json.dumps({"temperature": 0.125}))
    config, batch = case.config(model), reference.make_batch()
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        train(group, batch)
        found = logprobs(group, batch)["logprobs"]
        group.call("export_hf", str(tmp_path / "export"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(reference.hf_logprobs(exported, batch)[0].numpy(), found, atol=1e-5)
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "export" / name).read_bytes() == (model / name).read_bytes()
        (model / name).unlink()
    with (
        safe_open(tmp_path / "export" / "model.safetensors", "pt") as ours,
        safe_open(model / "model.safetensors", "pt") as own,
    ):
        assert set(ours.keys()) == set(own.keys())  # a tied head once


@pytest.mark.parametrize("case", [Case("qwen3", {DP: 2, CP: 2}, packed=True), Case("gemma3", {TP: 2})], ids=str)
def test_a_critic_is_plain_torchs(case: Case, pool: MegatronPool) -> None:
    batch, config = value_batch(), case.config(pool.models[case.model], optimizer=UNCLIPPED)
    deviation = json.loads((pool.models[case.model] / "config.json").read_text())["initializer_range"]
    head = torch.empty(1, 64).normal_(0, deviation, generator=torch.Generator().manual_seed(config.seed))
    expected = plain_torch(pool.models[case.model], head.numpy(), batch, config)
    with pool.group(config.policy.train_layout, config, kind="fsdp value") as group:
        np.testing.assert_allclose(own_values(group, batch), expected.values, atol=1e-5)
        losses = [train(group, batch, "value")["loss"] for _ in range(reference.STEPS)]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)


def test_a_teacher_has_no_state_to_train(pool: MegatronPool) -> None:
    batch, config = reference.make_batch(), Case("gemma3", {DP: 2}, packed=True).config(pool.models["gemma3"])
    expected = reference.train_reference(pool.models["gemma3"], batch, config, reference.sft_reference)
    with pool.group(config.policy.train_layout, config, kind="fsdp teacher") as group:
        np.testing.assert_allclose(logprobs(group, batch)["logprobs"], expected.logprobs, atol=1e-5)
