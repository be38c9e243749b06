"""dagrl's side of `bench generate`: quanta of a generation worker in this process, without Ray."""

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from dagrl import Batch, ParallelLayout, WorkerContext
from dagrl.bench.generate.vllm import largest, requests
from dagrl.bench.harness import answer
from dagrl.bench.workloads import RolloutCase, grpo_config
from dagrl.runtime.store import reserve_port

QUANTUM = 32  # engine steps of a quantum


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


def work(cases: list[dict[str, Any]], model: str, steps: int, engine: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the seconds of each step of every case. A step ends when the last request of its batch has."""
    from dagrl.config import Config
    from dagrl.workers.vllm import VllmWorker

    every = [RolloutCase(**case) for case in cases]
    values = grpo_config(largest(every), Path(model), engine)
    values["policy"]["generation"]["colocated"] = {"enabled": False}
    config = Config.model_validate(values)
    os.environ |= VllmWorker.environment(config)
    worker = VllmWorker(WorkerContext("generation", 0, ParallelLayout(), config.seed, 120.0), config)
    worker.setup(f"127.0.0.1:{reserve_port()}")
    draw, asked = random.Random(1), 0  # noqa: S311  # not cryptography
    found: dict[str, list[float]] = {}
    for case in every:
        found[case.name] = []
        for _ in range(1 + steps):
            new, nothing = quantum(requests(case, draw), asked, case.completion), quantum([], 0, 1)
            asked += case.sequences
            start = time.perf_counter()
            done = worker.generate(new)
            while done.unfinished:
                done = worker.generate(nothing)
            found[case.name].append(time.perf_counter() - start)
    worker.shutdown()
    return found


if __name__ == "__main__":
    answer(work)
