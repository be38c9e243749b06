"""Processes that each hold a `VllmWorker`, driven from the test process over pipes; no Ray.

One pair of processes runs the engines of all tests, forked from one that has imported vLLM, because that takes longer than
starting an engine. A third one forks processes for functions that need vLLM and no worker.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dagrl.config import Config
from dagrl.rl.generation import FinishedRequest, Generated, merge_generated
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import WorkerContext
from tests.integration.forked import fork_servers

SOCKETS = "VLLM_RPC_BASE_PATH"  # directory of vLLM's socket files


class Ranks:
    """Two processes, in which `engine` starts one of tensor parallel size 1 or 2, and one for what needs no worker."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._busy = False
        self._pipes, self.close = fork_servers(3, _prepare, _serve, environment)

    @contextmanager
    def engine(self, config: Config, tp: int) -> Iterator[Engine]:
        address = f"127.0.0.1:{reserve_port()}"
        assert not self._busy, "an engine is running; let its fixture end first (a test module of its own does that)"
        self._busy = True
        layout = ParallelLayout(tp=tp)
        if config.policy.generation is not None and config.policy.generation.vllm_cfg.expert_parallel_size > 1:
            layout = config.policy.generation.vllm_cfg.layout
        pipes = self._pipes[:tp]
        try:
            _all(pipes, [(_start, (WorkerContext("generation", rank, layout), config, address)) for rank in range(tp)])
            yield Engine(pipes)
        finally:
            _all(pipes, [(_shutdown, ())] * tp)
            self._busy = False

    def apart(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs `function(*args)` in a process of its own; `function` must be importable."""
        return _all(self._pipes[2:], [(_apart, (function, *args))])[0]


class Engine:
    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    @property
    def tp(self) -> int:
        return len(self._pipes)

    def on_all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs `function(worker, *args)` on every rank; `function` must be importable."""
        return _all(self._pipes, [(function, args)] * self.tp)

    def on_each(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return _all(self._pipes, [(function, args) for args in arguments])

    def on_ranks(self, calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
        return _all(self._pipes, calls)

    def generate(self, batch: Batch) -> Generated:
        return merge_generated(self.on_all(call, "generate", batch))

    def run(self, batch: Batch) -> list[FinishedRequest]:
        results, later = [self.generate(batch)], requests([], [])
        while results[-1].unfinished:
            results.append(self.generate(later))
        rows = [result.request(row) for result in results for row in range(len(result))]
        return sorted(rows, key=lambda row: row.request_id)


def requests(
    ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    *,
    new: int = 12,
    steps: int = 4,
    greedy: bool = False,
    seed: int = 0,
    seconds: float | None = None,
) -> Batch:
    """Returns a batch for `generate`. A request's seed is `seed` plus its id. `seconds` limits the quantum."""
    rows, width = len(ids), max((len(prompt) for prompt in prompts), default=1)
    tokens = np.zeros((rows, width), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    fields = {
        "tokens": tokens,
        "lengths": np.array([len(prompt) for prompt in prompts], np.int64),
        "request_ids": np.array(ids, np.int64),
        "seeds": np.array(ids, np.int64) + seed,
        "max_new_tokens": np.full(rows, new, np.int64),
        "greedy": np.full(rows, int(greedy), np.int64),
    }
    return Batch(fields, {"engine_steps": steps, **({} if seconds is None else {"seconds": seconds})})


def call(worker: Any, method: str, *args: Any) -> Any:
    return getattr(worker, method)(*args)


def _all(pipes: Sequence[Connection], calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    for pipe, message in zip(pipes, calls, strict=True):
        pipe.send(message)
    answers = []
    for pipe in pipes:
        assert pipe.poll(120), "a vLLM process did not answer within 120 s"
        answers.append(pipe.recv())
    for error, trace, _ in answers:
        if error is not None:
            error.add_note(trace)
            raise error
    return [value for _, _, value in answers]


_worker: Any = None


def _start(_: Any, context: WorkerContext, config: Config, address: str) -> None:
    global _worker
    from dagrl.workers.vllm import VllmWorker

    _worker = VllmWorker(context, config)
    _worker.setup(address)


def _shutdown(worker: Any) -> None:
    if worker is not None:  # never started
        worker.shutdown()


def _apart(_: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _prepare(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from dagrl.workers.vllm.launch import import_vllm

    import_vllm({})


def _serve(pipe: Connection) -> None:
    while (message := pipe.recv()) is not None:
        function, args = message
        if function is _apart and os.fork():  # the new process answers
            os.wait()
            continue
        try:
            pipe.send((None, "", function(_worker, *args)))
        except Exception as error:
            pipe.send((error, traceback.format_exc(), None))
        if function is _apart:
            os._exit(0)
