"""LoRA of both backends in every kind of layout, against the peft package on the same model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.config import Config
from dagrl.errors import ConfigError
from dagrl.refit import plan_refit
from dagrl.runtime.shapes import Batch
from dagrl.workers.fsdp import FsdpWorker
from dagrl.workers.train.hf_load import read_hf_config
from tests.integration import megatron_reference as reference
from tests.integration.test_megatron_state import receiving
from tests.integration.train_cases import UNCLIPPED, Case, each, fsdp, logprobs, megatron, train
from tests.integration.train_pool import WorkerError, WorkerPool
from tests.integration.vllm_models import whole_model

DIM, ALPHA = 4, 6.0


def adapters_of(path: Path | None = None, targets: tuple[str, ...] = (), **peft: Any) -> dict[str, Any]:
    """Returns keys of `policy` for adapters, by default of all linear layers, with those of a directory to begin with."""
    keys = {"enabled": True, "dim": DIM, "alpha": ALPHA, "target_modules": targets, **peft}
    return {"peft": {**keys, **({"adapter_path": str(path)} if path else {})}, "optimizer": UNCLIPPED}


class Peft:
    """A Hugging Face model with random adapters of the peft package, saved to `directory`."""

    def __init__(
        self, model: Path, directory: Path, targets: tuple[str, ...], experts: tuple[str, ...] = (), dim: int = DIM
    ) -> None:
        peft = pytest.importorskip("peft")
        torch.manual_seed(5)
        settings = peft.LoraConfig(
            r=dim,
            lora_alpha=ALPHA,
            target_modules=list(targets) or "all-linear",
            target_parameters=experts or None,
            task_type="CAUSAL_LM",
        )
        self.model, self.directory = peft.get_peft_model(reference.load_model(model), settings), directory
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        self.model.save_pretrained(directory)

    def logprobs(self, batch: Batch) -> Any:
        with torch.no_grad():
            return reference.hf_logprobs(self.model, batch)[0].numpy()

    def base_logprobs(self, batch: Batch) -> Any:
        with self.model.disable_adapter():
            return self.logprobs(batch)

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

    def learn(self, batch: Batch, config: Config) -> tuple[list[float], dict[str, Any]]:
        """Takes three steps of AdamW on the adapters. Returns losses, and the gradients of the first step."""
        adapters, losses, gradients = self.parameters(), [], {}
        optimizer = reference.adamw(adapters.values(), config)
        for _ in range(reference.STEPS):
            optimizer.zero_grad()
            loss = reference.sft_reference(reference.hf_logprobs(self.model, batch)[0], batch)
            loss.backward()
            losses.append(loss.item())
            gradients = gradients or {name: part.grad.clone().numpy() for name, part in adapters.items()}  # type: ignore[union-attr]
            optimizer.step()
        return losses, gradients


def assert_same_gradients(found: list[dict[str, Sequence[Any]]], expected: dict[str, Any]) -> None:
    """Checks that every rank has the whole gradient of its adapters."""
    seen = set()
    for rank in found:
        parts = {
            f"{name} {part}": gradient for name, pair in rank.items() for part, gradient in zip("AB", pair, strict=True)
        }
        reference.assert_gradients(parts, {name: expected[name] for name in parts}, 1e-5)
        seen |= parts.keys()
    assert seen == set(expected)


ATTENTION = ("q_proj", "v_proj", "o_proj")  # without k, whose rows lie between q and v
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
CASES: dict[Case, tuple[Case, tuple[str, ...], tuple[str, ...]]] = {
    megatron("qwen3", tp=2, sequence_parallel=True): (megatron("qwen3", pp=2), ATTENTION, ()),
    megatron("qwen3_tied", pp=2, tp=2): (megatron("qwen3_tied", dp=2, sharded=True), (), ()),
    megatron("llama", pp=2, vpp=2, recomputed=True, slow=True): (megatron("llama"), (), ()),
    # A worker has rows of queries, another those of keys and values.
    megatron("qwen3", tp=4, sequence_parallel=True, slow=True): (megatron("qwen3", cp=2), (), ()),
    megatron("qwen2", cp=2, dp=2, packed=True, slow=True): (megatron("qwen2", tp=2), (), ()),
    megatron("qwen3_moe", dp=2, tp=2, ep=2): (megatron("qwen3_moe", tp=2, ep=2, etp=1), ATTENTION, ()),
    megatron("qwen3_moe", dp=2, ep=2, sharded=True, slow=True): (megatron("qwen3_moe", tp=2, ep=2, etp=1), ATTENTION, ()),
    megatron("deepseek_v3", tp=2, slow=True): (megatron("deepseek_v3", dp=2, sharded=True), LATENT, ()),
    fsdp("gemma3", dp=2, packed=True): (fsdp("gemma3", dp=4), (), ()),
    fsdp("phi", section={"activation_checkpointing": "full"}, dp=2, slow=True): (fsdp("phi", dp=4), ("dense", "fc2"), ()),
    fsdp("qwen3_tied", slow=True): (fsdp("qwen3_tied", dp=4), ("v_proj", "layers.1.mlp.up_proj"), ()),
    fsdp("qwen3", dp=2, tp=2, slow=True): (fsdp("qwen3", dp=4), ("q_proj", "o_proj", "layers.1.mlp.down_proj"), ()),
    fsdp("qwen3_moe", dp=2, packed=True, slow=True): (fsdp("qwen3_moe", dp=4), ("q_proj",), EXPERTS),
    fsdp("qwen3_moe_mixed", dp=2, cp=2, slow=True): (
        fsdp("qwen3_moe_mixed", dp=4),
        ("v_proj",),
        ("layers.2.mlp.experts.down_proj",),
    ),
}
"""The layout in which the run resumes, linear layers (none: all) and stacked experts with adapters."""


@each(CASES)
def test_steps_and_files_match_peft(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    from peft import PeftModel

    other, targets, experts = CASES[case]
    model, batch = pool.models[case.model], reference.make_batch()
    peft = Peft(model, tmp_path / "theirs", targets, experts)
    extra = {"target_parameters": experts} if experts else {}
    keys = adapters_of(peft.directory, targets, **extra)
    with case.group(pool, **keys) as group:
        group.call("snapshot_reference")
        np.testing.assert_allclose(logprobs(group, batch)["logprobs"], peft.logprobs(batch), atol=1e-5, rtol=0)
        if case.backend == "megatron":
            train(group, batch, warmup="whole")
            gradients, trained = group.call("adapter_gradients"), group.call("trained_elements")
        losses = [train(group, batch)["loss"] for _ in range(reference.STEPS)]
        base = logprobs(group, batch, "reference")["logprobs"]
        np.testing.assert_allclose(base, peft.base_logprobs(batch), atol=1e-5, rtol=0)
        last = logprobs(group, batch)["logprobs"]
        group.call("save_checkpoint", str(tmp_path / "checkpoint"))
        group.call("export_hf", str(tmp_path / "export"))
        went_on = train(group, batch)["loss"]
    elements = sum(part.numel() for part in peft.parameters().values())
    expected, expected_gradients = peft.learn(batch, case.config(model, **keys))
    np.testing.assert_allclose(losses, expected, atol=1e-5, rtol=0)
    assert losses[-1] < losses[0] - 0.01
    if case.backend == "megatron" and not case.sharded:  # a part of the gradients and moments
        assert_same_gradients(gradients, expected_gradients)
        assert all(with_gradient == with_moments for with_gradient, with_moments in trained)
        assert trained[0][0] == elements or "pp" in case.sizes
    merged, plain = reference.load_model(tmp_path / "export"), reference.load_model(model)
    for exported in (merged, PeftModel.from_pretrained(plain, tmp_path / "export" / "adapter")):
        with torch.no_grad():
            np.testing.assert_allclose(reference.hf_logprobs(exported, batch)[0].numpy(), last, atol=1e-5, rtol=0)
    with other.group(pool, **adapters_of(None, targets, **extra)) as group:
        group.call("load_checkpoint", str(tmp_path / "checkpoint"))
        assert train(group, batch)["loss"] == pytest.approx(went_on, abs=1e-5)
    saved, weights = (sum(path.stat().st_size for path in at.iterdir()) for at in (tmp_path / "checkpoint", model))
    assert saved < 3 * weights  # adapters with moments, no base weights


def test_adapters_are_not_loaded_into_a_run_without_them(pool: WorkerPool, tmp_path: Path) -> None:
    with megatron("qwen3").group(pool, **adapters_of()) as group:
        group.call("save_checkpoint", str(tmp_path))
    with megatron("qwen3").group(pool) as group, pytest.raises(WorkerError, match="LoRA adapters"):
        group.call("load_checkpoint", str(tmp_path))


SENT = {
    megatron("qwen3_tied", tp=2, pp=2, slow=True): ("k_proj", "up_proj", "down_proj"),
    megatron("qwen3_moe", dp=2, ep=2): (),
}


@each(SENT)
def test_a_refit_of_adapters_alone_sends_those_of_the_export(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    """B is sent times the scale. Checked after each of two steps."""
    from safetensors.torch import load_file

    batch = reference.make_batch()
    with case.group(pool, **adapters_of(None, SENT[case], refit="adapters")) as group:
        group.call("export_hf", str(tmp_path / "start"))
        stored = load_file(tmp_path / "start" / "adapter" / "adapter_model.safetensors")
        received = {name.removeprefix("base_model.model."): torch.zeros_like(tensor) for name, tensor in stored.items()}
        plan = plan_refit(group.call("weight_slices"), [whole_model(received)], dtype="float32")
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


@each([fsdp("qwen3", dp=2), fsdp("qwen3", tp=2, slow=True)])
def test_a_refit_of_adapters_sends_both_factors_whole(case: Case, pool: WorkerPool) -> None:
    keys = adapters_of(refit="adapters")
    with case.group(pool, **keys, generation={"temperature": 1.0}) as group:
        train(group, reference.make_batch())
        weights = reference.assemble(group.call("weights"))
        ranks = group.call("sent")
    assert len(ranks) == 2
    for sent in ranks:
        assert sent.keys() == {name for name in ranks[0] if ".lora_" in name} and len(sent) == 4 * 2 * 7
        for name, value in sent.items():
            stem, _, part = name.removesuffix(".weight").rpartition(".")
            scale = ALPHA / DIM if part == "lora_B" else 1.0
            np.testing.assert_array_equal(value, weights[f"{stem}.{part}.default.weight"] * np.float32(scale))


def test_frozen_weights_have_no_gradient_products(pool: WorkerPool) -> None:
    """A step of full fine-tuning has a product of the shape of each weight; one with LoRA has none, and no buffers."""
    found = []
    for enabled in (False, True):
        with megatron("llama").group(pool, **adapters_of(enabled=enabled)) as group:
            (products,) = group.call("products", reference.make_batch())
            ((trained, _),) = group.call("trained_elements")
            (resident,) = group.call("resident_bytes")
        found.append(({(256, 64), (64, 128), (64, 256)} & set(products), resident["gradients"] / trained))
    (full, _), (lora, bytes_per_element) = found
    assert len(full) >= 2 and not lora
    assert bytes_per_element < 5  # float32, with little padding


DOWN = {"target_parameters": ["down_proj"]}
WRONG = [
    (fsdp("qwen3"), {"target_modules": ("qkv",)}, "target_modules has 'qkv', which no linear layer outside of experts is"),
    (fsdp("qwen3_moe", dp=2, ep=2), {}, "have no adapters next to expert parallelism"),
    (fsdp("qwen3_moe", tp=2), DOWN, "split over tensor-parallel ranks have no adapters"),
    (fsdp("qwen3_moe"), {**DOWN, "refit": "adapters"}, "have none of experts; set .*=merged"),
    (fsdp("qwen3_moe"), {**DOWN, "dim": 6}, "take multiples of 4, such as 8"),
    (
        fsdp("qwen3_moe"),
        {"target_parameters": ["up_proj"]},
        "no weight of experts .* expected experts.gate_up_proj, experts.d",
    ),
    (fsdp("qwen3"), DOWN, "the model has no experts that can have adapters"),
    (fsdp("qwen3_moe", dp=2), {"target_modules": ["down_proj"]}, "down_proj', which no linear layer outside"),
]


@pytest.mark.parametrize(("case", "peft", "message"), WRONG)
def test_adapters_that_do_not_fit_are_an_error_before_workers_start(
    case: Case, peft: dict[str, Any], message: str, tiny_models: dict[str, Path]
) -> None:
    model = tiny_models[case.model]
    with pytest.raises(ConfigError, match=message):
        FsdpWorker.check(case.config(model, peft={"enabled": True, **peft}), read_hf_config(model))
