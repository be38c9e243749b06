"""Critics, teachers, reference and reward models in parallel layouts: values, log-probabilities, gradients, files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.config import Config, Json, RandomInit
from dagrl.config.file import load_config
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.preferences import PreferenceAlgorithm, pair_losses
from dagrl.run.model import character_tokenizer, write_random_model
from dagrl.run.train import train as train_run
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from tests.integration import megatron_reference as reference
from tests.integration.main_job import GRPO, ROOT, steps_of
from tests.integration.train_cases import (
    UNCLIPPED,
    Case,
    columns,
    each,
    fsdp,
    gradients_of,
    logprobs,
    megatron,
    plain_torch,
    train,
)
from tests.integration.train_pool import Group, WorkerError, WorkerPool
from tests.unit.rl.test_preferences import FORMULAS, Formula

CLIP = 0.5  # the default of `critic.value_clip`


def value_batch() -> Batch:
    """Old values and returns: some values have moved beyond the clip."""
    batch, generator = reference.make_batch(), np.random.default_rng(5)
    fields = {name: generator.normal(0, 1, batch["loss_mask"].shape).astype(np.float32) for name in ("values", "returns")}
    return batch.with_fields(**fields)


class Critic(torch.nn.Module):
    """A Hugging Face decoder and a linear layer on its last hidden states."""

    def __init__(self, directory: Path, head: Tensor) -> None:
        from transformers import AutoModel

        super().__init__()
        self.model = AutoModel.from_pretrained(directory, dtype=torch.float32)
        self.score = torch.nn.Parameter(head.clone())

    def forward(self, batch: Batch) -> Tensor:
        """Returns values [rows, width]: at each token that of the hidden state before it."""
        rows = []
        for tokens, length in zip(batch["tokens"], batch["lengths"].tolist(), strict=True):
            hidden = self.model(torch.tensor(tokens[:length])[None]).last_hidden_state[0]
            rows.append(torch.nn.functional.pad((hidden @ self.score.T)[:-1, 0], (1, batch.tokens - length)))
        return torch.stack(rows)


@dataclass(frozen=True)
class Truth:
    """What plain torch gives: values, losses of `STEPS` steps, and the first step's gradients."""

    values: Any
    losses: list[float]
    gradients: Mapping[str, Any]


def plain_critic(directory: Path, head: Any, batch: Batch, config: Config) -> Truth:
    """Trains by the formula of verl's `compute_value_loss`, written apart, and AdamW."""
    critic = Critic(directory, torch.tensor(head))
    optimizer = reference.adamw(critic.parameters(), config)
    mask, old, returns = (torch.tensor(batch[name]) for name in ("loss_mask", "values", "returns"))
    first, losses, gradients = None, [], {}
    for _ in range(reference.STEPS):
        optimizer.zero_grad()
        values = critic(batch)
        first = values.detach().numpy() if first is None else first
        clipped = values.clamp(old - CLIP, old + CLIP)
        cost = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
        loss = 0.5 * (cost * mask).sum() / mask.sum()
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {
            "score.weight" if name == "score" else name: parameter.grad.clone().numpy()
            for name, parameter in critic.named_parameters()
        }
        optimizer.step()
    return Truth(first, losses, reference.checkpoint_names(gradients))


def own_values(group: Group, batch: Batch) -> Any:
    return columns(group, batch, "values", ("values",))["values"]


CRITICS = [
    megatron("qwen3", dp=2, slow=True),
    megatron("qwen3", tp=2, cp=2, packed=True),
    megatron("qwen3_tied", tp=2, pp=2, sequence_parallel=True),
    megatron("qwen3_moe", dp=2, pp=2, packed=True, slow=True),
    fsdp("qwen3", dp=2, cp=2, packed=True, slow=True),
    fsdp("gemma3", tp=2, slow=True),
]


@each(CRITICS)
def test_a_critic_is_that_of_plain_torch(case: Case, pool: WorkerPool) -> None:
    batch, keys = value_batch(), {"optimizer": UNCLIPPED}
    with case.group(pool, "value", **keys) as group:
        head = reference.assemble(group.call("weights"))["score.weight"]
        values = own_values(group, batch)
        train(group, batch, "value", warmup="whole")  # gradients, but no update
        gradients = gradients_of(group)
        losses = [train(group, batch, "value")["loss"] for _ in range(reference.STEPS)]
    assert head.shape == (1, 64) and 0.01 < head.std() < 0.04  # the usual range of transformers: 0.02
    model = pool.models[case.model]
    config = case.config(model, **keys)
    if case.backend == "fsdp":  # the same in any layout
        generator = torch.Generator().manual_seed(config.seed)
        np.testing.assert_array_equal(head, torch.empty(1, 64).normal_(0, 0.02, generator=generator))
    expected = plain_critic(model, head, batch, config)
    inside = np.arange(batch.tokens)[None] < batch["lengths"][:, None]
    np.testing.assert_allclose(values, expected.values * inside, atol=1e-5, rtol=0)
    np.testing.assert_allclose(losses, expected.losses, atol=1e-5, rtol=0)
    assert expected.losses[-1] < expected.losses[0]
    assert set(gradients) == set(expected.gradients)
    reference.assert_gradients(gradients, expected.gradients, 2e-4)


def test_a_critic_resumes_in_another_layout(pool: WorkerPool, tmp_path: Path) -> None:
    batch, directory = value_batch(), str(tmp_path / "critic")
    with megatron("qwen3", tp=2).group(pool, "value", optimizer=UNCLIPPED) as group:
        train(group, batch, "value")
        group.call("save_checkpoint", directory)
        values, step = own_values(group, batch), train(group, batch, "value")
    with megatron("qwen3", pp=2).group(pool, "value", optimizer=UNCLIPPED) as group:
        assert np.abs(own_values(group, batch) - values).max() > 1e-4
        group.call("load_checkpoint", directory)
        np.testing.assert_allclose(own_values(group, batch), values, atol=1e-5)
        assert train(group, batch, "value")["loss"] == pytest.approx(step["loss"], abs=1e-5)
    with megatron("qwen3").group(pool) as group, pytest.raises(WorkerError, match="model scalar = True"):
        group.call("load_checkpoint", directory)


@each([megatron("llama", tp=2, pp=2, packed=True), fsdp("gemma3", dp=2, packed=True, slow=True)])
def test_a_teacher_has_weights_alone(case: Case, pool: WorkerPool) -> None:
    with case.group(pool, "teacher") as group:
        found = logprobs(group, case.batch)["logprobs"]
        resident = group.call("resident_bytes")
    np.testing.assert_allclose(found, plain_torch(pool.models[case.model]).logprobs, atol=1e-5)
    assert all(parts["weights"] > 0 and parts["gradients"] == parts["optimizer"] == 0 for parts in resident)


COMMON = ("sft.max_num_steps=0", "grpo.val_period=0", "grpo.max_val_samples=16", "cluster.num_cpus=2", "cluster.num_gpus=0")


def distillation(directory: Path, name: str, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """Distills a larger random teacher, written to `directory`, and returns the metrics of all steps."""
    description: dict[str, Json] = dict(load_config(ROOT / GRPO).policy.random_init.hf_config)  # type: ignore[union-attr]
    init = RandomInit(hf_config={**description, "num_hidden_layers": 3, "hidden_size": 96, "initializer_range": 0.1}, seed=5)
    if not (directory / "teacher").exists():
        write_random_model(init, character_tokenizer("0123456789+="), directory / "teacher")
    loss = ("loss_fn.name=distill", "loss_fn.reference_policy_kl_penalty=0", "policy.optimizer.lr=2e-3")
    run = (
        f"name={name}",
        f"output_dir={directory}",
        f"grpo.max_num_steps={steps}",
        "policy.megatron_cfg.data_parallel_size=1",
    )
    config = load_config(ROOT / GRPO, (*COMMON, *loss, *run, *overrides))
    train_run(config)
    return steps_of(config)


@pytest.mark.slow
@pytest.mark.usefixtures("one_cluster")
def test_a_teacher_in_a_layout_of_its_own_teaches_the_same(tmp_path: Path) -> None:
    layout = "models.teacher.megatron_cfg.tensor_model_parallel_size=2"
    apart = distillation(tmp_path, "apart", 3, f"models.teacher.model_name={tmp_path / 'teacher'}", layout)
    here = distillation(tmp_path, "here", 3, f"models.teacher.model_name={tmp_path / 'teacher'}")
    for name in ("policy/reverse_kl", "loss", "grad_norm"):
        np.testing.assert_allclose([step[name] for step in apart], [step[name] for step in here], rtol=1e-3, err_msg=name)


REWARD_MODELS = [
    megatron("qwen3", dp=2),
    megatron("qwen3", cp=2, packed=True),
    megatron("qwen3", tp=2, pp=2, packed=True, slow=True),
]
ORDER = np.concatenate([np.arange(0, reference.ROWS, 2), np.arange(1, reference.ROWS, 2)])  # TRL's: chosen, then rejected


def scored_batch() -> Batch:
    """Rows whose score is read before their last token, which nothing sees."""
    batch = reference.make_batch()
    mask = np.arange(batch.tokens)[None] == batch["lengths"][:, None] - 1
    counts = {"global_valid_tokens": float(batch.rows), "global_valid_sequences": float(batch.rows)}
    return batch.with_fields(loss_mask=mask.astype(np.float32)).with_scalars(**counts)


def classifier(directory: Path, head: Any, batch: Batch, formula: Formula) -> tuple[Any, float, dict[str, Any]]:
    """Returns scores, loss and gradients of transformers' own sequence classifier with one label."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(torch.tensor(head))
    rows = zip(batch["tokens"], batch["lengths"].tolist(), strict=True)
    scores = torch.cat([model(torch.tensor(tokens[: length - 1])[None]).logits[:, 0] for tokens, length in rows])
    loss = formula(scores[ORDER], torch.zeros(batch.rows), torch.ones(batch.rows))
    loss.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return scores.detach().numpy(), loss.item(), gradients


@each(REWARD_MODELS)
def test_a_reward_model_is_transformers_classifier(case: Case, pool: WorkerPool) -> None:
    config, formula = FORMULAS["reward"]
    batch, algorithm = scored_batch(), algorithm_of(config)
    assert isinstance(algorithm, PreferenceAlgorithm)
    own = case.config(pool.models[case.model], optimizer=UNCLIPPED).model_copy(update={"algorithm": "reward_model"})
    with pool.group(ParallelLayout(**case.sizes), own, kind="megatron value") as group:
        head = reference.assemble(group.call("weights"))["score.weight"]
        found = columns(group, batch, "answer_sums", ("sums",), "policy")["sums"]
        losses = pair_losses(algorithm, found, np.ones(batch.rows, np.int64), None)
        weights = (losses.weights * batch.rows).astype(np.float32)
        train(group, batch.with_fields(answer_weights=weights), "policy", warmup="whole")
        gradients = gradients_of(group)
    scores, loss, expected = classifier(pool.models[case.model], head, batch, formula)
    np.testing.assert_allclose(found, scores, atol=1e-6)
    assert np.ptp(scores) > 0.1 and losses.metrics["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
    reference.assert_gradients(gradients, expected, 2e-5)
