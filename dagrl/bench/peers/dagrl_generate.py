"""dagrl's side of generation in `bench peers`: quanta of a generation worker in this process, without Ray."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np

from dagrl.bench.peers.case import PeerCase
from dagrl.bench.peers.dagrl_grpo import side_config
from dagrl.bench.peers.vllm_generate import requests
from dagrl.bench.turns import Told, serve, take_turns
from dagrl.runtime.ports import reserve_port
from dagrl.runtime.shapes import Batch

QUANTUM = 32
"""Engine steps of a quantum."""


def quantum(prompts: list[list[int]], first: int, completion: int) -> Batch:
    """Returns the batch of a quantum with new requests whose ids begin at `first`; without prompts, no new request."""
    rows = max(1, len(prompts))
    tokens = np.array(prompts or [[0]], np.int64)
    ids = np.arange(first, first + rows)
    fields = {
        "tokens": tokens,
        "lengths": np.full(rows, tokens.shape[1] if prompts else 0),
        "request_ids": ids,
        "seeds": ids,
        "max_new_tokens": np.full(rows, completion),
        "greedy": np.zeros(rows, bool),
    }
    return Batch(fields, {"engine_steps": QUANTUM})


def work(told: Told) -> None:
    """Starts a worker and takes turns. A step ends when the last request of its batch has."""
    from dagrl.runtime.layout import ParallelLayout
    from dagrl.runtime.worker import WorkerContext
    from dagrl.workers.vllm import VllmWorker

    config = side_config(told.order.largest, told.order.model, Path(), told.order.variant)
    os.environ |= VllmWorker.environment(config)
    worker = VllmWorker(WorkerContext("generation", 0, ParallelLayout(), config.seed, 120.0), config)
    worker.setup(f"127.0.0.1:{reserve_port()}")
    draw, asked = random.Random(1), 0  # noqa: S311  # not cryptography

    def step(case: PeerCase) -> float:
        nonlocal asked
        new, nothing = quantum(requests(case, draw), asked, case.completion), quantum([], 0, 1)
        asked += case.sequences
        start = time.perf_counter()
        done = worker.generate(new)
        while done.unfinished:
            done = worker.generate(nothing)
        return time.perf_counter() - start

    take_turns(told, lambda case, steps: [step(case) for _ in range(steps)])
    worker.shutdown()


if __name__ == "__main__":
    serve(work)
