"""Requests that wait for room in a small KV cache: fewer are preempted than by vLLM alone, and tokens are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.vllm_models import make_checkpoint, make_config
from tests.integration.vllm_ranks import Ranks, requests

PROMPTS = [[5 + (3 * group + token) % 80 for token in range(36)] for group in range(8) for _ in range(4)]
NEW = 100
MEMORY = 640 << 10  # of 640 tokens, which five sequences fill at their limit


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def count_preemptions(worker: Any) -> None:
    """From now on the scheduler counts how many requests it preempts, and the most that run."""
    scheduler = worker._llm.engine_core.engine_core.scheduler
    preempt, schedule = scheduler._preempt_request, scheduler.schedule
    scheduler.counted, scheduler.most = 0, 0

    def counted(*args: Any, **options: Any) -> None:
        scheduler.counted += 1
        preempt(*args, **options)

    def watched(*args: Any) -> Any:
        found = schedule(*args)
        scheduler.most = max(scheduler.most, len(scheduler.running))
        return found

    scheduler._preempt_request, scheduler.schedule = counted, watched


def counts(worker: Any) -> tuple[int, int]:
    """Returns both, and begins again."""
    scheduler = worker._llm.engine_core.engine_core.scheduler
    found, scheduler.counted, scheduler.most = (scheduler.counted, scheduler.most), 0, 0
    return found


def run(ranks: Ranks, checkpoint: Path, admission: str, memory: int, tp: int) -> tuple[list[list[list[int]]], list[Any]]:
    """The tokens of two batches of requests, and of each the preemptions and the most requests that ran at once."""
    options = {"max_num_seqs": 32, "kv_cache_memory_bytes": memory, "admission": admission, "num_scheduler_steps": 4}
    config = make_config(checkpoint, {"vllm_cfg": options, "vllm_kwargs": {"block_size": 32}}, length=256)
    made, counted = [], []
    with ranks.engine(config, tp) as engine:
        engine.on_all(count_preemptions)
        for first in (0, 100):
            rows = engine.run(requests(range(first, first + len(PROMPTS)), PROMPTS, new=NEW, steps=32))
            made.append([list(row.tokens) for row in rows])
            counted.append(engine.on_all(counts)[0])
    return made, counted


@pytest.mark.slow
def test_what_starts_is_held_until_it_ends(vllm_ranks: Ranks, checkpoint: Path) -> None:
    """Before a sequence has ended, no request is preempted. Then lengths are estimates, and few are."""
    expected, by_vllm = run(vllm_ranks, checkpoint, "prompt", MEMORY, tp=1)
    made, projected = run(vllm_ranks, checkpoint, "projected", MEMORY // 2, tp=2)  # each rank has half of the heads
    assert made == expected
    assert projected[0][0] == 0 < by_vllm[0][0], "the cache is too large for this test"
    assert projected[1][0] < by_vllm[1][0] / 2
    assert projected[0][1] < projected[1][1], "what is known of lengths is not used"
