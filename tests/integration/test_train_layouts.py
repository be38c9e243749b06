"""Training and log-probabilities of both backends in every layout, against transformers and plain torch in one process.

Losses are also compared with formulas written apart. These tests detect three silent errors of Megatron: gradients of q/k
norms not summed over tp (gradients, second loss), a loss multiplied by cp (gradients at cp2), and a two-stage interleaved
pipeline with batched transfers (first loss at vpp2).
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.bench.tiny_configs import tiny_model
from dagrl.bench.train_architectures import LAYOUTS, PACKED, STEPS, compare, make_batch, make_config, plain_steps
from dagrl.runtime.shapes import Batch
from tests.integration import megatron_reference as reference
from tests.integration.train_cases import (
    UNCLIPPED,
    Case,
    call_shards,
    each,
    fsdp,
    gradients_of,
    group_batch,
    logprobs,
    megatron,
    plain_group,
    plain_torch,
    run_case,
    run_group,
    shared_prefix,
    train,
)
from tests.integration.train_pool import Group, WorkerError, WorkerPool
from tests.unit.rl import test_losses as formulas

FULL, SELECTIVE, OFFLOADED = ({"activation_checkpointing": kind} for kind in ("full", "selective", "offloaded"))
EAGER = {"attn_implementation": "eager"}

CASES = [
    megatron("qwen3", overlap=True, dp=2),
    megatron("qwen3", sharded=True, overlap=True, dp=2, slow=True),
    megatron("qwen3", tp=4, slow=True),  # two key-value heads: a worker holds part of a query group
    megatron("qwen3", sequence_parallel=True, packed=True, tp=2, cp=2, slow=True),
    megatron("qwen3", pp=2, vpp=2),
    megatron("qwen3", pp=2, first_stage_layers=1, recomputed=True),
    megatron("qwen3", packed=True, pp=2, cp=2, slow=True),
    megatron("qwen3", sharded=True, sequence_parallel=True, recomputed=True, tp=2, pp=2, slow=True),
    megatron("qwen3", sharded=True, packed=True, dp=2, cp=2),
    megatron("qwen3_tied", tp=2, pp=2),
    megatron("qwen3_tied", sharded=True, overlap=True, dp=2, pp=2, vpp=2),
    megatron("qwen3_tied", packed=True, dp=2, pp=2, vpp=2, slow=True),
    megatron("qwen2", tp=2, slow=True),
    megatron("llama", cp=2, slow=True),
    megatron("mistral", packed=True, tp=2),
    megatron("qwen3_windows", packed=True, pp=2, cp=2),
    megatron("qwen3_windows", tp=2, slow=True),
    megatron("small_vocabulary", tp=2),
    megatron("qwen3_moe", overlap=True, dp=2, ep=2),
    megatron("qwen3_moe", cp=2, ep=2, slow=True),
    megatron("qwen3_moe", packed=True, recomputed=True, tp=2, cp=2, ep=2, slow=True),
    megatron("qwen3_moe", tp=2, ep=2, etp=1),
    megatron("qwen3_moe", sharded=True, dp=2, ep=2, slow=True),
    megatron("mixtral", packed=True, slow=True),
    megatron("mixtral", dp=2, tp=2, ep=2, slow=True),
    megatron("deepseek_v3", packed=True, recomputed=True, tp=2, pp=2),
    megatron("deepseek_v3", recomputed=True, dp=2, cp=2, slow=True),
    megatron("deepseek_v3", slow=True),
    megatron("deepseek_v3_plain", dp=2, tp=2, ep=2, slow=True),
    megatron("dynamic"),
    megatron("longrope", slow=True),
    megatron("qwen3_moe_mixed", dp=2, pp=2, ep=2),
    megatron("glm4_moe", dp=2, tp=2, ep=2, slow=True),
    megatron("glm4_moe_groups", packed=True, recomputed=True, pp=2, cp=2),
    fsdp("qwen3", slow=True),
    fsdp("qwen3", dp=2, packed=True, slow=True),
    fsdp("qwen3", tp=2, slow=True),
    fsdp("qwen3", dp=2, tp=2, packed=True, slow=True),
    fsdp("qwen3_tied", dp=4, replicas=2, packed=True),
    fsdp("qwen3_tied", tp=2, packed=True, slow=True),
    fsdp("qwen3", section=FULL, dp=2, slow=True),
    fsdp("qwen3", section=SELECTIVE, dp=2, slow=True),
    fsdp("qwen3", section=OFFLOADED, dp=2, packed=True),
    fsdp("gemma3", dp=2, slow=True),
    fsdp("gemma3", dp=2, packed=True),
    fsdp("gemma3", section=EAGER, dp=2, packed=True, slow=True),
    fsdp("gemma3", tp=2, packed=True, slow=True),
    fsdp("granite", dp=2, packed=True),
    fsdp("phi", dp=2, packed=True),
    fsdp("phi", tp=2, slow=True),
    fsdp("qwen3_moe", dp=2, packed=True, slow=True),
    fsdp("qwen3_moe", tp=2, slow=True),
    fsdp("qwen3_moe", tp=2, ep=2, slow=True),
    fsdp("qwen3_moe", dp=2, ep=2, packed=True, slow=True),
    fsdp("qwen3_moe", dp=2, tp=2, ep=2),
    fsdp("mixtral", dp=2),
    fsdp("gpt_oss", dp=2),
    fsdp("qwen3", cp=2, slow=True),
    fsdp("qwen3", cp=4, packed=True, slow=True),  # two key/value heads, repeated
    fsdp("qwen3", section=FULL, dp=2, cp=2, packed=True, slow=True),
    fsdp("qwen3_tied", tp=2, cp=2, packed=True),
    fsdp("gemma3", section=EAGER, cp=2, packed=True, slow=True),
    fsdp("gemma3", dp=2, cp=2, replicas=2, packed=True, slow=True),
    fsdp("gpt_oss", cp=2, slow=True),  # attention sinks
    fsdp("qwen3_moe", dp=2, cp=2, ep=4, packed=True, slow=True),
]


@each(CASES)
def test_three_steps_match_plain_torch(case: Case, pool: WorkerPool) -> None:
    found, expected = run_case(pool, case), plain_torch(pool.models[case.model])
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=1e-5, rtol=0)
    if not case.sharded:
        assert set(found.gradients) == set(expected.gradients)
        reference.assert_gradients(found.gradients, expected.gradients, 2e-4)
    np.testing.assert_allclose(found.losses, expected.losses, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)
    assert expected.losses[-1] < expected.losses[0] - 0.01


IN_BFLOAT16 = [
    megatron("qwen3"),
    megatron("qwen3", sharded=True, dp=2),
    megatron("qwen3_tied", tp=2),
    megatron("qwen3_moe", dp=2, ep=2),
]


@each(IN_BFLOAT16)
def test_bfloat16_is_close_to_float32(case: Case, pool: WorkerPool) -> None:
    """By bounds that a model without attention violates."""
    found = run_case(pool, case, precision="bfloat16")
    assert not reference.beyond_bfloat16(found, plain_torch(pool.models[case.model]))


@pytest.mark.parametrize(("recomputed", "times"), [(True, 2), (False, 1)], ids=["all", "none"])
def test_activations_are_recomputed_where_asked(recomputed: bool, times: int, pool: WorkerPool) -> None:
    """Each layer runs once per microbatch, and again in the backward pass. Cases above check the gradients."""
    with megatron("qwen3", recomputed=recomputed).group(pool) as group:
        (runs,) = group.call("attention_runs", reference.make_batch())
    assert runs == [times * reference.ROWS // 2] * 4  # microbatches of two rows, in each layer


GRPO_CASES = [
    megatron("qwen3", dp=2),
    megatron("qwen3", tp=2, pp=2),
    fsdp("gemma3", dp=2, packed=True),
    fsdp("qwen3", tp=2, slow=True),
    fsdp("gemma3", cp=2, packed=True, slow=True),
]


@each(GRPO_CASES)
def test_grpo_steps_match_plain_torch(case: Case, pool: WorkerPool) -> None:
    """Means are over sequences, counted over a batch that is split by rows, or over tokens."""
    batch, token_level = reference.make_batch(grpo=True), case != GRPO_CASES[0]
    keys = {"generation": {"temperature": 0.7}}

    def loss(current: Tensor, batch: Batch) -> Tensor:
        return grpo_reference(current, batch, token_level)

    model = pool.models[case.model]
    expected = reference.train_reference(model, batch, case.config(model, **keys), loss)
    with case.group(pool, **keys) as group:
        group.call("set_loss", {"token_level_loss": token_level})
        train(group, batch, "policy", warmup="whole")
        gradients = gradients_of(group)
        steps = [train(group, batch, "policy") for _ in range(reference.STEPS)]
    np.testing.assert_allclose([step["loss"] for step in steps], expected.losses, atol=1e-5, rtol=0)
    np.testing.assert_allclose([step["grad_norm"] for step in steps], expected.norms, rtol=1e-4)
    reference.assert_gradients(gradients, expected.gradients, 2e-4)


def grpo_reference(current: Tensor, batch: Batch, token_level: bool) -> Tensor:
    """Clipped ratio and 0.01 x k3, averaged over tokens or over sequences' means."""
    mask, previous, fixed, advantages = (
        torch.tensor(batch[name]) for name in ("loss_mask", "prev_logprobs", "reference_logprobs", "advantages")
    )
    ratio = (current - previous).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    divergence = (fixed - current).exp() - (fixed - current) - 1
    token = (policy + 0.01 * divergence) * mask
    if token_level:
        return token.sum() / mask.sum()
    counts = mask.sum(1)
    return (token.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum()


@each([megatron("qwen3", dp=2, pp=2), megatron("qwen3", tp=2, cp=2, packed=True, slow=True)])
def test_a_step_on_kept_logprobs_is_the_step_that_is_given_them(case: Case, pool: WorkerPool) -> None:
    """Bit for bit. Kept ones stay on the shards that train on the rows; the batch has row ids in place of columns."""
    batch = reference.make_batch(grpo=True).with_scalars(lr=0.0)
    mask, names = batch["loss_mask"], {"policy": "prev_logprobs", "reference": "reference_logprobs"}
    fields = {name: array for name, array in batch.fields.items() if name not in names.values()}
    identified = Batch({**fields, "row_ids": 100 + np.arange(batch.rows)}, {**batch.scalars, "step": 7})
    with case.group(pool, optimizer=UNCLIPPED) as group:
        group.call("set_loss", {"reference_policy_kl_penalty": 0.1})
        group.call("snapshot_reference")
        rows = {model: logprobs(group, batch, model) for model in names}
        given = batch.with_fields(**{name: rows[model]["logprobs"] * mask for model, name in names.items()})
        wanted, wanted_gradients = train(group, given, "policy"), gradients_of(group)
        for model in names:
            call_shards(group, "keep_logprobs", identified, model)
        found, gradients = train(group, identified, "policy"), gradients_of(group)
    entropy = found.pop("policy/entropy")
    assert entropy == pytest.approx(float((rows["policy"]["entropy"] * mask).sum() / mask.sum()), rel=1e-6)
    assert found == wanted and wanted["grad_norm"] > 0.01
    for name, gradient in wanted_gradients.items():
        np.testing.assert_array_equal(gradients[name], gradient, err_msg=name)


SHARED_PREFIXES = [
    megatron("qwen3_windows"),
    megatron("qwen3", sequence_parallel=True, dp=2, tp=2),
    megatron("qwen3", pp=2, vpp=2, slow=True),
    megatron("deepseek_v3", sequence_parallel=True, tp=2, slow=True),
    fsdp("gemma3", section=FULL, tp=2),
    fsdp("qwen3", dp=2, tp=2, slow=True),
    fsdp("qwen3_moe", section=SELECTIVE, dp=2, ep=2, slow=True),
    fsdp("gemma3", section=EAGER, dp=2, slow=True),
]


@each(SHARED_PREFIXES)
def test_shared_prefixes_give_the_gradients_of_whole_sequences(case: Case, pool: WorkerPool) -> None:
    """The truth is transformers, one sequence at a time."""
    expected = plain_group(pool.models[case.model])
    with case.group(pool, **shared_prefix(True)) as group:
        found, saved = run_group(group, group_batch())
        group.call("set_packing", shared_prefix(False)["sequence_packing"])
        whole, none = run_group(group, group_batch())
    assert saved > 0.1 and none == 0
    np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=2e-6, rtol=0)
    np.testing.assert_allclose(found.entropy, whole.entropy, atol=2e-6, rtol=0)
    assert found.losses == pytest.approx(whole.losses, abs=1e-6)
    reference.assert_gradients(found.gradients, whole.gradients, 5e-6)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=1e-5, rtol=0)
    assert found.losses == pytest.approx(expected.losses, abs=2e-6)
    reference.assert_gradients(found.gradients, expected.gradients, 2e-5)


@pytest.mark.slow
def test_rotary_factors_are_those_of_the_runs_length(pool: WorkerPool) -> None:
    """Also of rows, and of context-parallel ranks' parts of them, that are shorter than the long factors begin with."""
    batch, model = reference.make_batch(), reference.load_model(pool.models["phi3_long"])
    model.config.rope_parameters["short_factor"] = model.config.rope_parameters["long_factor"]
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.no_grad():
        expected = reference.hf_logprobs(model, batch)[0].numpy()
    with fsdp("phi3_long", cp=2).group(pool, max_total_sequence_length=22) as group:
        np.testing.assert_allclose(logprobs(group, batch)["logprobs"], expected, atol=1e-5, rtol=0)


def test_a_model_whose_packed_rows_see_each_other_is_refused(pool: WorkerPool) -> None:
    """GPT-OSS of transformers 5.19 makes masks without positions, so eager attention does not tell sequences apart."""
    with pytest.raises(WorkerError, match="sequences of a packed row see each other in GptOssForCausalLM"):
        with fsdp("gpt_oss", packed=True).group(pool):
            pass


def muon(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    matrices = [one for one in model.model.layers.parameters() if one.ndim == 2]
    rest = [one for one in model.parameters() if all(one is not other for other in matrices)]
    groups = reference.decay_groups(rest, 0.01)
    return [
        torch.optim.Muon([{"params": matrices, "weight_decay": 0.01}], lr=1e-3, momentum=0.9),
        torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-6),
    ]


def sgd(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(reference.decay_groups(model.parameters(), 0.01), lr=1e-3, momentum=0.5)]


@pytest.mark.parametrize(
    ("optimizer", "optimizers_of", "atol"),
    [
        ({"name": "torch.optim:Muon", "args": {"momentum": 0.9}}, muon, 2e-3),  # it multiplies in bfloat16
        ({"name": "torch.optim:SGD", "args": {"momentum": 0.5}}, sgd, 1e-5),  # has no fused kernels for shards
    ],
    ids=["Muon", "SGD"],
)
def test_optimizers_by_their_paths_match_plain_torch(
    optimizer: dict[str, Any], optimizers_of: Any, atol: float, pool: WorkerPool
) -> None:
    """Muon's updates need whole matrices, of which each rank has a part."""
    case, batch, keys = fsdp("qwen3", dp=2), reference.make_batch(), {"optimizer": {**UNCLIPPED, **optimizer}}
    model = pool.models[case.model]
    config = case.config(model, **keys)
    expected = reference.train_reference(model, batch, config, reference.sft_reference, optimizers_of=optimizers_of)
    with case.group(pool, **keys) as group:
        losses = [train(group, batch)["loss"] for _ in range(reference.STEPS)]
    np.testing.assert_allclose(losses, expected.losses, atol=atol)


ARCHITECTURES = {
    "Cohere2ForCausalLM": ("dp2", PACKED),  # scaled logits
    "DeepseekV3ForCausalLM": ("tp2", PACKED),  # latent attention
    "Gemma2ForCausalLM": ("dp2", PACKED),  # capped logits
    "Gemma4ForCausalLM": ("cp2", PACKED),  # heads of two sizes
    "GPT2LMHeadModel": ("dp2", PACKED),
    "Olmo2ForCausalLM": ("tp2", PACKED),  # norms after layers, and of all heads together
    "HrmTextForCausalLM": ("dp2", PACKED),  # layers that run many times, parameters that files have joined
    "OlmoHybridForCausalLM": ("dp2", {}),  # linear attention
}
SLOW_ARCHITECTURES = ("HrmTextForCausalLM", "OlmoHybridForCausalLM")
"""What the table's own command has too, and takes longest."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_ARCHITECTURES)) for name in ARCHITECTURES]
)
def test_steps_are_those_of_transformers(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    tiny_model(name, seed=0).float().save_pretrained(tmp_path)  # type: ignore[operator]
    layout, packing = ARCHITECTURES[name]
    expected, config = plain_steps(tmp_path), make_config(tmp_path, LAYOUTS[layout], packing)
    with pool.group(config.policy.train_layout, config, kind="fsdp policy") as group:
        steps = [train(group, make_batch(), kind) for kind in STEPS]
    _, wrong = compare([(step["loss"], step["grad_norm"]) for step in steps], expected)
    assert not wrong


NAMES = ("dual clip", "gspo", "cispo", "reinforce", "distill")


@pytest.fixture(scope="module", params=[{"tp": 2}, {"cp": 2}], ids=["megatron-tp2", "megatron-cp2"])
def group(request: pytest.FixtureRequest, pool: WorkerPool) -> Iterator[Group]:
    with megatron("qwen3", packed=True, **request.param).group(pool, optimizer=UNCLIPPED) as group:
        yield group


@cache
def expected(model: Path, name: str) -> tuple[float, Any]:
    """Returns the loss and the gradients of one process, over sequences' means."""
    batch, (_, formula) = reference.make_batch(grpo=True), formulas.FORMULAS[name]
    fields = {name: torch.tensor(batch[name]) for name in ("prev_logprobs", "reference_logprobs", "advantages", "loss_mask")}
    rows = fields["loss_mask"].sum(1) > 0

    def loss(logprobs: Tensor, _: Batch) -> Tensor:
        cost = formula(logprobs[rows], {name: field[rows] for name, field in fields.items()})
        return formulas.sequence_mean(cost, fields["loss_mask"][rows])

    config = reference.make_config(model, optimizer=UNCLIPPED)
    run = reference.train_reference(model, batch, config, loss, steps=1)
    return run.losses[0], run.gradients


def loss_keys(name: str) -> dict[str, Any]:
    options, _ = formulas.FORMULAS[name]
    return {"ratio_clip_c": None, **formulas.CLIP, **formulas.NO_KL, **options, "token_level_loss": False}


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_match_one_process(name: str, group: Group, tiny_models: dict[str, Path]) -> None:
    loss, gradients = expected(tiny_models["qwen3"], name)
    group.call("set_loss", loss_keys(name))
    step = train(group, reference.make_batch(grpo=True), "policy", warmup="whole")  # gradients, but no update
    assert step["loss"] == pytest.approx(loss, abs=2e-6)
    reference.assert_gradients(gradients_of(group), gradients, 2e-5)


def test_the_gradients_of_two_losses_are_compared(group: Group, tiny_models: dict[str, Path]) -> None:
    batch, names, model = reference.make_batch(grpo=True), ("reinforce", "gspo"), tiny_models["qwen3"]
    one, two = (flat_gradient(expected(model, name)[1]) for name in names)
    group.call("set_loss", loss_keys(names[0]))
    other = reference.make_config(model).with_keys({f"loss_fn.{key}": value for key, value in loss_keys(names[1]).items()})
    for ours, theirs, distance in group.call("compare_gradients", [batch], [batch], other):
        found = [ours.shared["grad_norm"], theirs.shared["grad_norm"], distance]
        assert found == pytest.approx([np.linalg.norm(one), np.linalg.norm(two), np.linalg.norm(one - two)], rel=1e-4)


def flat_gradient(gradients: Any) -> Any:
    return np.concatenate([np.ravel(gradients[name]) for name in sorted(gradients)])
