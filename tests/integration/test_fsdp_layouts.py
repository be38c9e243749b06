"""FSDP workers in every layout, against transformers and plain torch in one process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.bench.tiny_configs import tiny_model
from dagrl.bench.train_architectures import LAYOUTS, PACKED as PACKED_ROWS, STEPS, make_batch, make_config, plain_steps
from dagrl.config import Config
from dagrl.runtime.shapes import Batch
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool, WorkerError
from tests.integration.test_megatron_layouts import (
    PACKED,
    UNCLIPPED,
    group_batch,
    grpo_reference,
    logprobs,
    run_group,
    train,
)

DP, REPLICAS, TP, EP = "data_parallel_size", "data_parallel_replicas", "tensor_parallel_size", "expert_parallel_size"
CP = "context_parallel_size"
LETTERS = {DP: "dp", REPLICAS: "replicas", TP: "tp", CP: "cp", EP: "ep"}


@dataclass(frozen=True)
class Case:
    model: str
    layout: dict[str, int] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    packed: bool = False

    def __str__(self) -> str:
        sizes = "".join(f"{LETTERS[name]}{size}" for name, size in self.layout.items())
        return "-".join(filter(None, (self.model, sizes, *map(str, self.fsdp.values()), "packed" * self.packed)))

    def config(self, directory: Path, **policy: Any) -> Config:
        packed = PACKED if self.packed else {}
        keys = {"backend": "fsdp", "fsdp_cfg": {**self.layout, **self.fsdp}, **packed, **policy}
        return reference.make_config(directory, **keys)


CASES = [
    Case("qwen3"),
    Case("qwen3", {DP: 2}, packed=True),
    Case("qwen3", {TP: 2}),
    Case("qwen3", {DP: 2, TP: 2}, packed=True),
    Case("qwen3_tied", {DP: 4, REPLICAS: 2}, packed=True),
    Case("qwen3_tied", {TP: 2}, packed=True),
    Case("qwen3", {DP: 2}, {"activation_checkpointing": "full"}),
    Case("qwen3", {DP: 2}, {"activation_checkpointing": "selective"}),
    Case("qwen3", {DP: 2}, {"activation_checkpointing": "offloaded"}, packed=True),
    Case("gemma3", {DP: 2}),
    Case("gemma3", {DP: 2}, packed=True),
    Case("gemma3", {DP: 2}, {"attn_implementation": "eager"}, packed=True),
    Case("gemma3", {TP: 2}, packed=True),
    Case("granite", {DP: 2}, packed=True),
    Case("phi", {DP: 2}, packed=True),
    Case("phi", {TP: 2}),
    Case("qwen3_moe", {DP: 2}, packed=True),
    Case("qwen3_moe", {TP: 2}),
    Case("qwen3_moe", {TP: 2, EP: 2}),
    Case("qwen3_moe", {DP: 2, EP: 2}, packed=True),
    Case("qwen3_moe", {DP: 2, TP: 2, EP: 2}),
    Case("mixtral", {DP: 2}),
    Case("gpt_oss", {DP: 2}),
    Case("qwen3", {CP: 2}),
    Case("qwen3", {CP: 4}, packed=True),  # two key/value heads, repeated
    Case("qwen3", {DP: 2, CP: 2}, {"activation_checkpointing": "full"}, packed=True),
    Case("qwen3_tied", {TP: 2, CP: 2}, packed=True),
    Case("gemma3", {CP: 2}, {"attn_implementation": "eager"}, packed=True),
    Case("gemma3", {DP: 2, CP: 2, REPLICAS: 2}, packed=True),
    Case("gpt_oss", {CP: 2}),  # attention sinks
    Case("qwen3_moe", {DP: 2, CP: 2, EP: 4}, packed=True),
]

SLOW = {
    "qwen3",
    "qwen3-dp2-packed",
    "qwen3-tp2",
    "qwen3-dp2tp2-packed",
    "qwen3_tied-tp2-packed",
    "qwen3-dp2-full",
    "qwen3-dp2-selective",
    "gemma3-dp2",
    "gemma3-dp2-eager-packed",
    "gemma3-tp2-packed",
    "phi-tp2",
    "qwen3_moe-dp2-packed",
    "qwen3_moe-tp2",
    "qwen3_moe-tp2ep2",
    "qwen3_moe-dp2ep2-packed",
    "qwen3-cp2",
    "qwen3-cp4-packed",
    "qwen3-dp2cp2-full-packed",
    "gemma3-cp2-eager-packed",
    "gemma3-dp2cp2replicas2-packed",
    "gpt_oss-cp2",
    "qwen3_moe-dp2cp2ep4-packed",
}
"""Cases whose parts others in CI have too."""


def run_case(pool: MegatronPool, case: Case, model: Path, **policy: Any) -> reference.Run:
    """Runs a case on the batch. Gradients have the names of the module."""
    batch, config = reference.make_batch(), case.config(model, optimizer=UNCLIPPED, **policy)
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        first = logprobs(group, batch)
        train(group, batch, warmup="whole")  # gradients, but no update
        gradients = reference.assemble(group.call("gradients"))
        steps = [train(group, batch) for _ in range(reference.STEPS)]
    losses, norms = [step["loss"] for step in steps], [step["grad_norm"] for step in steps]
    return reference.Run(first["logprobs"], first["entropy"], losses, norms, gradients)


@cache
def plain_run(model: Path) -> reference.Run:
    config = reference.make_config(model, optimizer=UNCLIPPED)
    return reference.train_reference(model, reference.make_batch(), config, reference.sft_reference)


@cache
def plain_gradients(model: Path, *, groups: bool = False) -> Mapping[str, Any]:
    """Returns the gradients of the same batch, or of one with groups, by the names in the module."""
    batch, module = group_batch() if groups else reference.make_batch(), reference.load_model(model)
    reference.sft_reference(reference.hf_logprobs(module, batch)[0], batch).backward()
    parameters = module.named_parameters()
    return {name: np.zeros(one.shape) if one.grad is None else one.grad.numpy() for name, one in parameters}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (str(case) in SLOW)) for case in CASES], ids=str
)
def test_steps_match_plain_torch(case: Case, pool: MegatronPool) -> None:
    model = pool.models[case.model]
    found, expected = run_case(pool, case, model), plain_run(model)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=1e-5, rtol=0)
    reference.assert_gradients(found.gradients, plain_gradients(model), 2e-4)
    np.testing.assert_allclose(found.losses, expected.losses, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)
    assert expected.losses[-1] < expected.losses[0] - 0.01


@pytest.mark.parametrize(
    "case",
    [
        Case("gemma3", {DP: 2}, packed=True),
        pytest.param(Case("qwen3", {TP: 2}), marks=pytest.mark.slow),
        pytest.param(Case("gemma3", {CP: 2}, packed=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_grpo_steps_match_plain_torch(case: Case, pool: MegatronPool) -> None:
    batch, config = (reference.make_batch(grpo=True), case.config(pool.models[case.model], generation={"temperature": 0.7}))

    def loss(current: Tensor, batch: Batch) -> Tensor:
        return grpo_reference(current, batch, token_level=True)

    expected = reference.train_reference(pool.models[case.model], batch, config, loss)
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        steps = [train(group, batch, "policy") for _ in range(reference.STEPS)]
    np.testing.assert_allclose([step["loss"] for step in steps], expected.losses, atol=1e-5, rtol=0)
    np.testing.assert_allclose([step["grad_norm"] for step in steps], expected.norms, rtol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        Case("gemma3", {TP: 2}, {"activation_checkpointing": "full"}, packed=True),
        pytest.param(Case("qwen3", {DP: 2, TP: 2}, packed=True), marks=pytest.mark.slow),
        pytest.param(
            Case("qwen3_moe", {DP: 2, EP: 2}, {"activation_checkpointing": "selective"}, packed=True), marks=pytest.mark.slow
        ),
        pytest.param(Case("gemma3", {DP: 2}, {"attn_implementation": "eager"}, packed=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shared_prefixes_give_the_gradients_of_whole_sequences(case: Case, pool: MegatronPool) -> None:
    """The truth is transformers, one sequence at a time."""
    model, batch = pool.models[case.model], group_batch()
    packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96, "shared_prefix": True}
    config = case.config(model, optimizer=UNCLIPPED, sequence_packing=packing)
    truth = reference.train_reference(model, batch, config, reference.sft_reference, steps=1)
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        found = run_group(group, batch)
    assert found["saved"] > 0.1
    inside = np.arange(batch.tokens) < batch["lengths"][:, None]
    for name, expected in (("logprobs", truth.logprobs), ("entropy", truth.entropy)):
        np.testing.assert_allclose(found[name], expected * inside, atol=1e-5, rtol=0)
    assert found["loss"] == pytest.approx(truth.losses[0], abs=2e-6)
    reference.assert_gradients(found["gradients"], plain_gradients(model, groups=True), 2e-5)


@pytest.mark.slow
def test_rotary_factors_are_those_of_the_runs_length(pool: MegatronPool) -> None:
    """Also of rows, and of context-parallel ranks' parts of them, that are shorter than the long factors begin with."""
    batch, model = reference.make_batch(), reference.load_model(pool.models["phi3_long"])
    model.config.rope_parameters["short_factor"] = model.config.rope_parameters["long_factor"]
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.no_grad():
        expected = reference.hf_logprobs(model, batch)[0].numpy()
    config = Case("phi3_long", {CP: 2}).config(pool.models["phi3_long"], max_total_sequence_length=22)
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        np.testing.assert_allclose(logprobs(group, batch)["logprobs"], expected, atol=1e-5, rtol=0)


def test_a_model_whose_packed_rows_see_each_other_is_refused(pool: MegatronPool) -> None:
    """GPT-OSS of transformers 5.19 makes masks without positions, so eager attention does not tell sequences apart."""
    config = Case("gpt_oss", packed=True).config(pool.models["gpt_oss"])
    with pytest.raises(WorkerError, match="sequences of a packed row see each other in GptOssForCausalLM"):
        with pool.group(config.policy.train_layout, config, kind="fsdp"):
            pass


def test_muon_has_the_matrices_of_the_layers(pool: MegatronPool) -> None:
    """Its updates need whole matrices, of which each rank has a part."""
    from transformers import AutoModelForCausalLM

    batch, optimizer = reference.make_batch(), {"name": "torch.optim:Muon", "args": {"momentum": 0.9}, **UNCLIPPED}
    config = Case("qwen3", {DP: 2}).config(pool.models["qwen3"], optimizer=optimizer)
    model, wanted = (
        AutoModelForCausalLM.from_pretrained(pool.models["qwen3"], dtype=torch.float32),
        config.policy.optimizer,
    )
    layers = [one for one in model.model.layers.parameters() if one.ndim == 2]
    rest = [one for one in model.parameters() if all(one is not other for other in layers)]
    vectors, tables = ([one for one in rest if one.ndim == ndim] for ndim in (1, 2))
    decay = {"weight_decay": wanted.weight_decay}
    muon = torch.optim.Muon([{"params": layers, **decay}], lr=wanted.lr, momentum=0.9)
    groups = [{"params": tables, **decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=wanted.lr, betas=(wanted.adam_beta1, wanted.adam_beta2), eps=wanted.adam_eps)
    expected = []
    for _ in range(reference.STEPS):
        loss = reference.sft_reference(reference.hf_logprobs(model, batch)[0], batch)
        model.zero_grad()
        loss.backward()
        muon.step(), adam.step()
        expected.append(loss.item())
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        losses = [train(group, batch)["loss"] for _ in range(reference.STEPS)]
    np.testing.assert_allclose(losses, expected, atol=2e-3)  # it multiplies in bfloat16


def test_any_optimizer_is_found_by_its_path(pool: MegatronPool) -> None:
    """One without fused kernels for shards."""
    from transformers import AutoModelForCausalLM

    batch, optimizer = reference.make_batch(), {**UNCLIPPED, "name": "torch.optim:SGD", "args": {"momentum": 0.5}}
    config = Case("qwen3", {DP: 2}).config(pool.models["qwen3"], optimizer=optimizer)
    wanted = config.policy.optimizer
    model = AutoModelForCausalLM.from_pretrained(pool.models["qwen3"], dtype=torch.float32)
    decays = {True: wanted.weight_decay, False: 0.0}
    groups = [
        {"params": [one for one in model.parameters() if (one.ndim > 1) is matrices], "weight_decay": decay}
        for matrices, decay in decays.items()
    ]
    plain, expected = torch.optim.SGD(groups, lr=wanted.lr, momentum=0.5), []
    for _ in range(reference.STEPS):
        loss = reference.sft_reference(reference.hf_logprobs(model, batch)[0], batch)
        model.zero_grad()
        loss.backward()
        plain.step()
        expected.append(loss.item())
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        losses = [train(group, batch)["loss"] for _ in range(reference.STEPS)]
    np.testing.assert_allclose(losses, expected, atol=1e-5)


def test_an_optimizer_that_cannot_update_shards_is_an_error(pool: MegatronPool) -> None:
    config = Case("qwen3", {DP: 2}).config(pool.models["qwen3"], optimizer={"name": "torch.optim:Rprop"})
    message = r"torch\.optim:Rprop, which cannot update the weights of this layout: RuntimeError"
    with pytest.raises(WorkerError, match=message), pool.group(config.policy.train_layout, config, kind="fsdp"):
        pass


PADDED: dict[str, Any] = {}
ARCHITECTURES = [
    ("Cohere2ForCausalLM", "dp2", PACKED_ROWS),  # scaled logits
    ("DeepseekV3ForCausalLM", "tp2", PACKED_ROWS),  # latent attention
    ("Gemma2ForCausalLM", "dp2", PACKED_ROWS),  # capped logits
    ("Gemma4ForCausalLM", "cp2", PACKED_ROWS),  # heads of two sizes
    ("GPT2LMHeadModel", "dp2", PACKED_ROWS),
    ("Olmo2ForCausalLM", "tp2", PACKED_ROWS),  # norms after layers, and of all heads together
    ("HrmTextForCausalLM", "dp2", PACKED_ROWS),  # layers that run many times, parameters that files have joined
    ("OlmoHybridForCausalLM", "dp2", PADDED),  # linear attention
]

SLOW_ARCHITECTURES = {"HrmTextForCausalLM", "OlmoHybridForCausalLM"}
"""What the table's own command has too, and takes longest."""


@pytest.mark.parametrize(
    ("name", "layout", "packing"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=[pytest.mark.slow] * (case[0] in SLOW_ARCHITECTURES))
        for case in ARCHITECTURES
    ],
)
def test_steps_are_those_of_transformers(
    name: str, layout: str, packing: dict[str, Any], pool: MegatronPool, tmp_path: Path
) -> None:
    tiny_model(name, seed=0).float().save_pretrained(tmp_path)  # type: ignore[operator]
    expected, config = plain_steps(tmp_path), make_config(tmp_path, LAYOUTS[layout], packing)
    with pool.group(config.policy.train_layout, config, kind="fsdp") as group:
        steps = [train(group, make_batch(), kind) for kind in STEPS]
    losses, norms = zip(*expected, strict=True)
    np.testing.assert_allclose([step["loss"] for step in steps], losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose([step["grad_norm"] for step in steps], norms, rtol=1e-4)
