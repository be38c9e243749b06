"""Tensor-parallel ranks of vLLM on GPUs agree from their first batch on, with CUDA graphs; a dead peer frees the others.

Ranks do not exchange tokens. With vLLM's custom all-reduce, ranks drew different tokens in the first batch after a start.
The worker disables it, and every quantum compares a digest of the ranks' tokens.
"""

import time
from pathlib import Path

import pytest

from dagrl.errors import RunError
from tests.gpu import needs_gpus
from tests.gpu.test_vllm_worker import PROMPTS, SHAPES, batch, difference, gpu_config, make_gpu_checkpoint, started
from tests.integration import vllm_calls
from tests.integration.vllm_ranks import call, requests


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [make_gpu_checkpoint(root / str(seed), seed, **SHAPES["tiny"]) for seed in range(2)]


@pytest.mark.parametrize(("start", "tp"), [(0, 2), (1, 2), pytest.param(2, 4, marks=needs_gpus(4))])
def test_first_batches_agree(cluster: None, checkpoints: list[Path], start: int, tp: int) -> None:
    """`Engine.run` raises if ranks differ. The tokens are also plausible under the model."""
    with started(checkpoints, gpu_config(checkpoints[0], eager=False, tp=tp), tp=tp, warm=False) as engine:
        prompts = [PROMPTS[row % 8] for row in range(64)]
        for round_ in range(3):
            rows = engine.run(requests(range(64), prompts, new=32, steps=16, seed=round_))
            assert difference(checkpoints[0], rows, prompts) < 0.05
        engine.write(1, 1)
        assert difference(checkpoints[1], engine.run(batch(1, greedy=False)), PROMPTS) < 0.05
        if start == 1:
            check_abort(engine.group)


def test_a_slow_first_batch_agrees(cluster: None, tmp_path: Path) -> None:
    """The host runs ahead of the GPU in a thread's first step, and still waits for what it reads."""
    model = make_gpu_checkpoint(tmp_path / "model", 0, **SHAPES["0.6B"])
    prompts = [[3 + (7 * row + 11 * place) % 900 for place in range(200 + row % 8)] for row in range(64)]
    with started([model], gpu_config(model, eager=False, tp=2), tp=2, warm=False) as engine:
        rows = engine.run(requests(range(64), prompts, new=4, steps=8))
    assert difference(model, rows, prompts) < 0.05


def check_abort(group: object) -> None:
    """`abort` frees a rank whose peer does not join the step. It returns no tokens."""
    lone = group.actors[0].__ray_call__.remote(vllm_calls.generate_then_abort, requests([500], PROMPTS[:1]), 1.0)  # type: ignore[attr-defined]
    import ray

    begun = time.monotonic()
    assert ray.get(lone, timeout=30) < 20
    assert time.monotonic() - begun < 25
    with pytest.raises((RunError, ray.exceptions.RayTaskError), match="restart"):
        ray.get(group.actors[0].__ray_call__.remote(call, "generate", requests([501], PROMPTS[:1])), timeout=30)  # type: ignore[attr-defined]
