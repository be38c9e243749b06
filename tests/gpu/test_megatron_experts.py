"""On one GPU: grouped experts in BF16 against sequential experts in float32, for a layer and whole steps."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from dagrl.telemetry.metrics import merge_step_metrics
from tests.integration import megatron_reference as reference
from tests.integration.test_megatron_state import assert_joined
from tests.integration.train_cases import UNCLIPPED, WAYS, plain_torch
from tests.integration.train_workers import TestedMegatronWorker, gradients_alone, single_worker
from tests.unit.workers.test_megatron_experts import dispatched, inputs_of, looped, make_experts, relative, routed, run

pytest.importorskip("megatron.core")

SMALL, WIDE = (128, 40), (2048, 768)  # widths of the model and of an expert; WIDE: Qwen3-30B-A3B's
CASES = {
    "odd": (SMALL, [3, 1, 129, 64, 7, 33]),
    "empty": (SMALL, [0, 5, 0, 0, 130, 1, 0]),  # the first, the last, and some between
    "all-empty": (SMALL, [0, 0, 0]),
    "one": (SMALL, [77]),
    "many": (WIDE, [0, 1, 250, 1031] * 8),
    "few": (WIDE, [9, 0, 1, 30] * 8),  # below 128 a group torch's kernel has other tiles
}


def poison() -> None:
    """Fills free memory with NaN, so that elements a kernel does not write show."""
    torch.full((1 << 28,), torch.nan, device="cuda")


def run_on_gpu(way: Literal["grouped", "sequential"], dtype: torch.dtype, case: str) -> dict[str, Tensor]:
    (hidden, ffn), counts = CASES[case]
    layer = make_experts(way, len(counts), hidden=hidden, ffn=ffn, dtype=torch.bfloat16)  # the same weights in both
    layer.to("cuda", dtype)
    poison()
    return run(layer, counts, inputs_of(counts, hidden))


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_close_to_float32(case: str) -> None:
    exact = run_on_gpu("sequential", torch.float32, case)
    near = run_on_gpu("sequential", torch.bfloat16, case)
    found = run_on_gpu("grouped", torch.bfloat16, case)
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert found[name].shape == value.shape and found[name].dtype is near[name].dtype
        if value.any():
            assert relative(found[name], value) < 1.2 * relative(near[name], value) + 1e-3 < 0.03, name
        else:  # an expert without tokens
            assert not found[name].any(), name


@pytest.mark.parametrize("case", ["odd", "empty", "all-empty"])
def test_float32_equals_sequential_experts(case: str) -> None:
    exact = run_on_gpu("sequential", torch.float32, case)
    for name, value in run_on_gpu("grouped", torch.float32, case).items():
        torch.testing.assert_close(value, exact[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("width", [40, 2048])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 4, 2), (333, 128, 8), (64, 3, 1)])
def test_sorted_rows_and_their_sums_match_a_loop(tokens: int, experts: int, chosen: int, width: int) -> None:
    ids, mask, weights = routed(tokens, experts, chosen, "cuda")
    hidden, upper = (torch.randn(tokens, 1, width, device="cuda", dtype=torch.float64) for _ in range(2))
    scales = torch.randn(experts, width, device="cuda", dtype=torch.float64)
    exact = [one.requires_grad_() for one in (hidden, weights, scales)]
    near = [one.detach().float().requires_grad_() for one in exact]
    found, expected = dispatched(near[0], ids, mask, *near[1:]), looped(hidden, mask, weights, scales)
    gradients = torch.autograd.grad(found, near, upper.float()), torch.autograd.grad(expected, exact, upper)
    for one, truth in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert relative(one, truth) < 1e-5


def test_no_layer_waits_for_the_device(models: dict[str, Path]) -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch has a grouped kernel for Hopper and Blackwell; elsewhere it goes from expert to expert")
    with single_worker(reference.make_config(models["qwen3_moe"], precision="bfloat16"), TestedMegatronWorker) as made:
        layer = made.megatron().trainer.model.chunks[0].decoder.layers[0].mlp
        hidden = torch.randn(32, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        upper = torch.randn_like(hidden)
        layer(hidden)[0].backward(upper)  # what the first call alone does
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(hidden)[0].backward(upper)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def step_of(model: Path, precision: str, experts: type, **policy: Any) -> tuple[dict[str, Any], float, float]:
    """Returns gradients by the names of checkpoints, loss and gradient norm of a step. `experts`: the kind of its layers."""
    config = reference.make_config(model, precision=precision, optimizer=UNCLIPPED, **policy)
    with single_worker(config, TestedMegatronWorker) as made:
        assert {type(module) for module in made.modules(torch.nn.Module) if hasattr(module, "local_experts")} == {experts}
        with gradients_alone():
            figures = merge_step_metrics([made.train_step(reference.make_batch(), "likelihood")]).flat()
        assert_joined(made)
        return reference.assemble([made.gradients()]), figures["loss"], figures["grad_norm"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_bf16_steps_are_as_close_to_float32_as_with_sequential_experts(
    name: str, way: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = plain_torch(models[name])
    from megatron.core.transformer.moe.experts import SequentialMLP

    from dagrl.workers.megatron.experts import GroupedExperts

    found, loss, norm = step_of(models[name], "bfloat16", GroupedExperts, **WAYS[way])

    class Sequential(SequentialMLP):  # type: ignore[misc]
        def join_weights(self) -> None: ...

    monkeypatch.setattr("dagrl.workers.megatron.model.GroupedExperts", Sequential)
    near, near_loss, near_norm = step_of(models[name], "bfloat16", Sequential, **WAYS[way])
    assert reference.gradient_error(near, truth.gradients) < 0.05
    assert reference.gradient_error(found, truth.gradients) < 1.2 * reference.gradient_error(near, truth.gradients) + 1e-3
    assert loss == pytest.approx(near_loss, rel=2e-3)
    assert norm == pytest.approx(near_norm, rel=2e-2)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_float32_steps_match_plain_torch(name: str, models: dict[str, Path]) -> None:
    from dagrl.workers.megatron.experts import GroupedExperts

    truth = plain_torch(models[name])
    found, loss, norm = step_of(models[name], "float32", GroupedExperts)
    assert reference.gradient_error(found, truth.gradients) < 1e-5
    assert loss == pytest.approx(truth.losses[0], rel=1e-5)
    assert norm == pytest.approx(truth.norms[0], rel=1e-4)
