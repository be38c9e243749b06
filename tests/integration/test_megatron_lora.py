"""LoRA in every kind of layout, against the peft package on the same model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.refit import plan_refit
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool, WorkerError
from tests.integration.test_megatron_layouts import PACKED, UNCLIPPED, logprobs, train
from tests.integration.test_megatron_refit import receiving, whole_model

DIM, ALPHA = 4, 6.0
DENSE, ATTENTION = (), ("q_proj", "v_proj", "o_proj")  # all linear layers; without k, whose rows lie between q and v
RECOMPUTED, SHARDED = {"activation_checkpointing": True}, {"sharded": True}


def config_of(model: Path, adapters: Path | None, targets: tuple[str, ...], megatron: dict[str, Any], **policy: Any) -> Any:
    peft = {"enabled": True, "dim": DIM, "alpha": ALPHA, "target_modules": targets, **policy.pop("peft", {})}
    peft |= {"adapter_path": str(adapters)} if adapters else {}
    optimizer = {**UNCLIPPED, **policy.pop("optimizer", {})}
    return reference.make_config(model, megatron_cfg=megatron, peft=peft, optimizer=optimizer, **policy)


class Peft:
    """A Hugging Face model with random adapters of the peft package, saved to `directory`."""

    def __init__(
        self, model: Path, directory: Path, targets: tuple[str, ...], experts: tuple[str, ...] = (), dim: int = DIM
    ) -> None:
        peft = pytest.importorskip("peft")
        from transformers import AutoModelForCausalLM

        torch.manual_seed(5)
        settings = peft.LoraConfig(
            r=dim,
            lora_alpha=ALPHA,
            target_modules=list(targets) or "all-linear",
            target_parameters=experts or None,
            task_type="CAUSAL_LM",
        )
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model, self.directory = peft.get_peft_model(base, settings), directory
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        self.model.save_pretrained(directory)

    def parameters(self) -> dict[str, Tensor]:
        """Returns the adapters by the names of Hugging Face's parameters, with `A` or `B`."""
        found = {name: part for name, part in self.model.named_parameters() if part.requires_grad}
        ends = {f".lora_{part}.default.weight": f".weight {part}" for part in "AB"}
        return {
            name.removeprefix("base_model.model.").replace(end, ends[end]): part
            for name, part in found.items()
            for end in ends
            if name.endswith(end)
        }


def learn(adapters: dict[str, Tensor], loss: Callable[[], Tensor], config: Any) -> tuple[list[float], dict[str, Any]]:
    """Three steps of AdamW on the adapters. Returns losses, and the gradients of the first step."""
    wanted = config.policy.optimizer
    decay = wanted.weight_decay
    optimizer = torch.optim.AdamW(adapters.values(), wanted.lr, (0.9, 0.999), wanted.adam_eps, weight_decay=decay)
    losses, gradients = [], {}
    for _ in range(reference.STEPS):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        losses.append(value.item())
        gradients = gradients or {name: part.grad.clone().numpy() for name, part in adapters.items()}  # type: ignore[union-attr]
        optimizer.step()
    return losses, gradients


def assert_same_gradients(found: list[dict[str, Sequence[Any]]], expected: dict[str, Any]) -> None:
    """Checks that every rank has the whole gradient of its adapters."""
    seen = set()
    for rank in found:
        for name, adapter in rank.items():
            for part, gradient in zip("AB", adapter, strict=True):
                seen.add(f"{name} {part}")
                wanted = expected[f"{name} {part}"]
                scale = float(np.abs(wanted).max()) or 1.0
                np.testing.assert_allclose(gradient / scale, wanted / scale, atol=1e-5, rtol=0, err_msg=f"{name} {part}")
    assert seen == set(expected)


LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
CASES = [
    pytest.param("qwen3", ParallelLayout(tp=2), ATTENTION, {"sequence_parallel": True}, {}, id="tp2-sp-attention"),
    pytest.param("qwen3_tied", ParallelLayout(pp=2, tp=2), DENSE, {}, {}, id="tp2pp2-tied"),
    pytest.param(
        "llama", ParallelLayout(pp=2, vpp=2), DENSE, RECOMPUTED, {}, id="pp2vpp2-recomputed", marks=pytest.mark.slow
    ),
    # A worker has rows of queries, another those of keys and values.
    pytest.param("qwen3", ParallelLayout(tp=4), DENSE, {"sequence_parallel": True}, {}, id="tp4-sp", marks=pytest.mark.slow),
    pytest.param("qwen2", ParallelLayout(cp=2, dp=2), DENSE, {}, PACKED, id="dp2cp2-packed", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", ParallelLayout(dp=2, tp=2, ep=2), ATTENTION, {}, {}, id="dp2tp2ep2-experts"),
    pytest.param("deepseek_v3", ParallelLayout(tp=2), LATENT, {}, {}, id="tp2-latent", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "layout", "targets", "megatron", "policy"), CASES)
def test_losses_gradients_and_files_match_peft(
    model: str,
    layout: ParallelLayout,
    targets: tuple[str, ...],
    megatron: dict[str, Any],
    policy: dict[str, Any],
    pool: MegatronPool,
    tmp_path: Path,
) -> None:
    peft = Peft(pool.models[model], tmp_path / "theirs", targets)
    batch = reference.make_batch()
    config = config_of(pool.models[model], peft.directory, targets, megatron, **policy)
    expected = reference.hf_logprobs(peft.model, batch)[0].detach().numpy()
    with peft.model.disable_adapter(), torch.no_grad():
        base = reference.hf_logprobs(peft.model, batch)[0].numpy()
    with pool.group(layout, config) as group:
        group.call("snapshot_reference")
        np.testing.assert_allclose(logprobs(group, batch)["logprobs"], expected, atol=1e-5, rtol=0)
        np.testing.assert_allclose(logprobs(group, batch, "reference")["logprobs"], base, atol=1e-5, rtol=0)
        train(group, batch, warmup="whole")
        gradients = group.call("adapter_gradients")
        losses = [train(group, batch)["loss"] for _ in range(reference.STEPS)]
        group.call("export_hf", str(tmp_path / "ours"))
        trained = group.call("trained_elements")
        after = logprobs(group, batch)["logprobs"]
    wanted, expected_gradients = learn(
        peft.parameters(), lambda: reference.sft_reference(reference.hf_logprobs(peft.model, batch)[0], batch), config
    )
    np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)
    assert losses[-1] < losses[0] - 0.01
    assert_same_gradients(gradients, expected_gradients)
    assert all(with_gradient == with_moments for with_gradient, with_moments in trained)
    if layout.pp == 1:
        assert trained[0][0] == sum(part.numel() for part in peft.parameters().values())
    assert_exported(pool.models[model], tmp_path / "ours", batch, after)


def assert_exported(base: Path, exported: Path, batch: Batch, expected: Any) -> None:
    """peft loads the adapters on the base model; the merged model is the same."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(original, exported / "adapter")
    for model in (merged, adapted):
        with torch.no_grad():
            found = reference.hf_logprobs(model, batch)[0].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


SENT = [
    pytest.param(
        "qwen3_tied",
        ParallelLayout(tp=2, pp=2),
        ("k_proj", "up_proj", "down_proj"),
        id="tied-tp2pp2",
        marks=pytest.mark.slow,
    ),
    pytest.param("qwen3_moe", ParallelLayout(dp=2, ep=2), DENSE, id="moe-dp2ep2"),
]


@pytest.mark.parametrize(("model", "layout", "targets"), SENT)
def test_a_refit_of_adapters_alone_sends_those_of_the_export(
    model: str, layout: ParallelLayout, targets: tuple[str, ...], pool: MegatronPool, tmp_path: Path
) -> None:
    """B is sent times the scale. Checked after each of two steps."""
    from safetensors.torch import load_file

    config = config_of(pool.models[model], None, targets, {}, peft={"refit": "adapters"})
    batch = reference.make_batch()
    with pool.group(layout, config) as group:
        group.call("export_hf", str(tmp_path / "start"))
        stored = load_file(tmp_path / "start" / "adapter" / "adapter_model.safetensors")
        shapes = {name.removeprefix("base_model.model."): tensor.shape for name, tensor in stored.items()}
        received = {name: torch.zeros(shape) for name, shape in shapes.items()}
        plan = plan_refit(group.call("weight_slices"), [whole_model(shapes)], dtype="float32")
        with receiving(group, plan, received) as receive:
            for version in (1, 2):
                train(group, batch)
                reports = receive(version)
                assert sum(report.bytes_sent for report in reports) == 4 * sum(t.numel() for t in stored.values())
                group.call("export_hf", str(tmp_path / str(version)))
                stored = load_file(tmp_path / str(version) / "adapter" / "adapter_model.safetensors")
                for name, tensor in received.items():
                    scale = ALPHA / DIM if "lora_B" in name else 1.0
                    torch.testing.assert_close(tensor, stored[f"base_model.model.{name}"] * scale, atol=0, rtol=1e-6)
                assert max(t.abs().max() for name, t in received.items() if "lora_B" in name) > 1e-4


RESUMED = [
    pytest.param(
        "qwen3_tied", (ParallelLayout(tp=2, pp=2), {}), (ParallelLayout(dp=2), SHARDED), id="dense", marks=pytest.mark.slow
    ),
    pytest.param("qwen3_moe", (ParallelLayout(dp=2, ep=2), SHARDED), (ParallelLayout(tp=2, ep=2, etp=1), {}), id="experts"),
]


@pytest.mark.parametrize(("model", "first", "second"), RESUMED)
def test_a_run_resumes_in_another_layout(model: str, first: Any, second: Any, pool: MegatronPool, tmp_path: Path) -> None:
    batch, directory = reference.make_batch(), tmp_path / "saved"
    configs = [config_of(pool.models[model], None, DENSE, {}, **keys) for _, keys in (first, second)]
    with pool.group(first[0], configs[0]) as group:
        for _ in range(2):
            train(group, batch)
        group.call("save_checkpoint", str(directory))
        went_on = [train(group, batch)["loss"] for _ in range(2)]
    with pool.group(second[0], configs[1]) as group:
        group.call("load_checkpoint", str(directory))
        np.testing.assert_allclose([train(group, batch)["loss"] for _ in range(2)], went_on, atol=1e-5, rtol=0)
    weights = sum(path.stat().st_size for path in pool.models[model].glob("*.safetensors"))
    assert sum(path.stat().st_size for path in directory.iterdir()) < 3 * weights  # adapters with moments, no base weights
    with (
        pool.group(ParallelLayout(), reference.make_config(pool.models[model])) as group,
        pytest.raises(WorkerError, match="LoRA adapters"),
    ):
        group.call("load_checkpoint", str(directory))


def test_frozen_weights_have_no_gradient_products(pool: MegatronPool) -> None:
    """A step of full fine-tuning has a product of the shape of each weight; one with LoRA has none, and no buffers."""
    found = []
    for peft in (False, True):
        config = config_of(pool.models["llama"], None, DENSE, {}, peft={"enabled": peft})
        with pool.group(ParallelLayout(), config) as group:
            (products,) = group.call("products", reference.make_batch())
            ((trained, _),) = group.call("trained_elements")
            (resident,) = group.call("resident_bytes")
        found.append(({(256, 64), (64, 128), (64, 256)} & set(products), resident["gradients"] / trained))
    (full, _), (lora, bytes_per_element) = found
    assert len(full) >= 2 and not lora
    assert bytes_per_element < 5  # float32, with little padding
