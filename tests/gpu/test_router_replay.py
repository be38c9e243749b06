"""Experts on GPUs: the router's loss, choices that vLLM records under CUDA graphs, both engines with equal experts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.telemetry.metrics import merge_step_metrics
from tests.gpu import needs_gpus
from tests.gpu.test_vllm_worker import gpu_config, started
from tests.integration import megatron_reference as reference
from tests.integration.test_model_runs import MODEL, runs_without_and_with_replay
from tests.integration.test_train_routing import BALANCE, BALANCED, Routers, check_close, figures_of, loss_of, recorded_batch
from tests.integration.train_cases import PACKED, UNCLIPPED
from tests.integration.train_workers import TestedMegatronWorker, gradients_alone, single_worker
from tests.integration.vllm_models import make_checkpoint
from tests.integration.vllm_ranks import requests

pytest.importorskip("megatron.core")
pytest.importorskip("vllm")
EXPERTS, CHOSEN = 16, 4


def test_loss_and_gradients_of_routers_match_the_papers(tmp_path: Path) -> None:
    batch, directory = reference.make_batch(), reference.make_model("qwen3_moe", tmp_path)
    model = reference.load_model(directory)
    routers = Routers(model, batch)
    likelihood = reference.sft_reference(reference.hf_logprobs(model, batch)[0], batch)
    balance = loss_of(routers, batch, 1)
    torch.autograd.backward(likelihood + BALANCE * balance)
    keys = {"megatron_cfg": {"activation_checkpointing": True, **BALANCED}}
    config = reference.make_config(directory, precision="float32", optimizer=UNCLIPPED, **keys)
    with single_worker(config, TestedMegatronWorker) as worker:
        with gradients_alone():
            step = merge_step_metrics([worker.train_step(batch, "likelihood")]).flat()
        gradients = reference.assemble([worker.gradients()])
    assert step["moe/load_balancing_loss"] == pytest.approx(balance.item() / len(routers.logits), rel=1e-4)
    expected = figures_of(routers)
    assert {name: step[f"moe/{name}"] for name in expected} == pytest.approx(expected, rel=1e-3)
    check_close(gradients, model, 2e-3)


def test_replayed_experts_match_the_record(tmp_path: Path) -> None:
    directory = reference.make_model("qwen3_moe_mixed", tmp_path)
    plain, model = reference.make_batch(), reference.load_model(directory)
    batch, forced = recorded_batch(plain, model.config.num_hidden_layers, model.config.num_experts, 2, dense=1)
    Routers(model, plain, forced)
    expected = reference.hf_logprobs(model, plain)[0].detach().numpy()
    config = reference.make_config(directory, precision="float32", router_replay=True, **PACKED)
    with single_worker(config, TestedMegatronWorker) as worker:
        found = worker.own_logprobs(batch)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


WAYS = [
    pytest.param(True, 1, id="eager"),
    *(pytest.param(False, tp, marks=needs_gpus(tp), id=f"graphs-tp{tp}") for tp in (1, 2, 4)),
]


@pytest.mark.parametrize(("eager", "tp"), WAYS)
def test_recorded_experts_match_hugging_face(eager: bool, tp: int, cluster: None, tmp_path: Path) -> None:
    """In bfloat16 few choices differ from those in float32. Rows of other tokens would agree by chance, a quarter."""
    sizes: dict[str, Any] = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "mlp_only_layers": [],
        "moe_intermediate_size": 128,
    }
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3_moe", hidden_size=256, vocab_size=1000, **sizes)
    config = gpu_config(checkpoint, eager, tp)
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"router_replay": True})})
    prompts = [[3 + (7 * row + 11 * place) % 900 for place in range(5 + 9 * row)] for row in range(8)]
    prompts += [[*prompts[7][:50], 5, 6], [*prompts[7][:64], 9]]
    with started([checkpoint], config, tp) as engine:
        rows = engine.run(requests(range(8), prompts[:8], new=24))
        rows += engine.run(requests([8, 9], prompts[8:], new=24))  # their first blocks are cached
    model = reference.load_model(checkpoint)
    routers = Routers(model, reference.make_batch())
    routers.lengths = [0] * len(prompts)
    equal = []
    for index, row in enumerate(rows):
        with torch.no_grad():
            model(torch.tensor([[*prompts[index], *row.tokens]]))
        assert row.experts is not None
        found = row.experts.reshape(len(row.experts), -1, CHOSEN)
        for layer, logits in routers.logits.items():
            own = logits[index].topk(CHOSEN, -1).indices.numpy()[: len(found)]
            equal.append((found[:, layer, :, None] == own[:, None]).any(-1).mean())
    assert len(rows) == len(prompts) and min(equal) > 0.85 and np.mean(equal) > 0.95


def test_generation_and_training_are_closer_with_the_same_experts(tmp_path: Path) -> None:
    options = (
        *(f"policy.random_init.hf_config={MODEL}", "policy.precision=bfloat16"),
        *("policy.megatron_cfg.data_parallel_size=1", "policy.generation.colocated={enabled: true}"),
        "policy.generation.vllm_cfg.enforce_eager=false",
    )
    error, _ = runs_without_and_with_replay(tmp_path, *options)
    assert error[True] < 0.7 * error[False], error
