"""The parameters that weight decay affects, clipping, and steps without a learning signal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from dagrl.config import LossConfig
from dagrl.runtime.layout import ParallelLayout
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool
from tests.integration.test_megatron_layouts import UNCLIPPED, train


def test_weight_decay_affects_only_matrices(megatron_pool: MegatronPool, tiny_models: dict[str, Path]) -> None:
    """AdamW's first step in closed form: the gradient's sign times the rate, plus decay."""
    rate, decay, eps = 1e-2, 0.5, 1e-8
    optimizer = UNCLIPPED | {"lr": rate, "weight_decay": decay, "adam_eps": eps}
    batch = reference.make_batch()
    config = reference.make_config(tiny_models["qwen2"], optimizer=optimizer, sharded=True)  # with biases
    gradients = reference.train_reference(tiny_models["qwen2"], batch, config, reference.sft_reference).gradients
    threads = group_threads(megatron_pool)
    with megatron_pool.group(ParallelLayout(dp=2), config) as group:
        train(group, batch)
        after = reference.assemble(group.call("weights"))
    left = np.subtract(group_threads(megatron_pool), threads)
    assert left.max() <= 3, "of a sharded optimizer's groups none stays, at most torch's first one with its three threads"
    before = load_file(tiny_models["qwen2"] / "model.safetensors")
    assert {values.ndim for values in gradients.values()} == {1, 2}
    for name, gradient in gradients.items():
        start = before[name].numpy()
        expected = start - rate * gradient / (np.abs(gradient) + eps) - (rate * decay * start if gradient.ndim > 1 else 0)
        clear = np.abs(gradient) > 1e-4  # the sign of nearly 0 is rounding noise
        assert clear.any()
        np.testing.assert_allclose(after[name][clear], expected[clear], atol=2e-5, rtol=0, err_msg=name)


def group_threads(pool: MegatronPool) -> list[int]:
    """Threads of Gloo's groups in each process."""
    tasks = [Path(f"/proc/{pid}/task").glob("*/comm") for pid in pool.pids]
    return [sum("gloo" in name.read_text() for name in names) for names in tasks]


def test_only_gradients_above_the_limit_are_clipped(megatron_pool: MegatronPool, tiny_models: dict[str, Path]) -> None:
    batch, found = reference.make_batch(), {}
    limits = {"scaled": 0.25, "within": 10.0}
    configs = {
        name: reference.make_config(tiny_models["qwen3"], optimizer={"clip_grad": value}) for name, value in limits.items()
    }
    for name, config in configs.items():
        with megatron_pool.group(ParallelLayout(), config) as group:
            norm = train(group, batch)["grad_norm"]
            found[name] = reference.assemble(group.call("gradients"))
    assert limits["scaled"] < norm < limits["within"]
    truth = reference.train_reference(tiny_models["qwen3"], batch, configs["scaled"], reference.sft_reference).gradients
    for name, gradient in truth.items():  # torch's clipping in place
        np.testing.assert_allclose(found["scaled"][name], gradient, atol=1e-6, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(found["within"][name], gradient * (norm / limits["scaled"]), atol=1e-5, rtol=1e-4)


def test_a_step_without_gradients_is_skipped_and_counted(megatron_pool: MegatronPool, tiny_models: dict[str, Path]) -> None:
    batch = reference.make_batch(grpo=True)
    config = reference.make_config(tiny_models["qwen3"], generation={"temperature": 0.7})
    config = config.model_copy(update={"loss_fn": LossConfig(reference_policy_kl_penalty=0.0)})
    equal = batch.with_fields(advantages=np.zeros_like(batch["advantages"]))
    with megatron_pool.group(ParallelLayout(dp=2), config) as group:
        train(group, batch, "policy")  # creates moments, which would move the weights
        before = group.call("weights")
        skipped = train(group, equal, "policy")
        assert (skipped["grad_norm"], skipped["skipped_steps"]) == (0.0, 1)
        for mine, theirs in zip(group.call("weights"), before, strict=True):
            for (name, _, values), (_, _, kept) in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(values, kept, err_msg=name)
        assert train(group, batch, "policy")["skipped_steps"] == 1


def test_adam_is_torchs_even_with_transformer_engine(megatron_pool: MegatronPool, tiny_models: dict[str, Path]) -> None:
    """Transformer Engine and Apex keep step counts elsewhere, so checkpoints would contain 0."""
    with megatron_pool.group(ParallelLayout(), reference.make_config(tiny_models["qwen3"])) as group:
        assert group.call("optimizers_beside_another_adam") == [{"torch.optim.adamw.AdamW"}]
