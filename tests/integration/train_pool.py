"""Four long-lived processes for train workers of any layout, forked from one that has imported Megatron and transformers."""

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from dagrl.config import Config
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import ReplayContext, WorkerContext, replay_context
from tests.integration.forked import fork_servers

SIZE = 4

Warmup = bool | Literal["whole"]
"""Whether a call is a warm-up. `whole`: one that runs every microbatch (`gradients_alone`)."""


class WorkerError(Exception):
    """A worker's exception; `kind` is the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class Group:
    """Workers of one layout, one per process."""

    connections: Sequence[Connection]
    layout: ParallelLayout

    def start(self, rank: int, method: str, *args: Any, warmup: Warmup = False) -> None:
        self.connections[rank].send((method, args, warmup))

    def finish(self, rank: int, timeout_s: float = 120.0) -> Any:
        """Returns the result of the call on one worker. Raises WorkerError."""
        if not self.connections[rank].poll(timeout_s):
            raise TimeoutError(f"worker {rank} did not answer within {timeout_s} s")
        error, value = self.connections[rank].recv()
        if error is not None:
            raise WorkerError(*error)
        return value

    def call(
        self, method: str, *args: Any, warmup: Warmup = False, per_rank: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Calls a method on all workers at once. Returns results in rank order."""
        ranks = range(len(self.connections))
        for rank in ranks:
            self.start(rank, method, *(per_rank[rank] if per_rank else args), warmup=warmup)
        results, errors = [], []
        for rank in ranks:
            try:
                results.append(self.finish(rank))
            except WorkerError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results


class WorkerPool:
    """Processes in which `group` creates workers, and tiny Hugging Face `models` for them by name."""

    def __init__(self, size: int = SIZE, models: Mapping[str, Path] | None = None) -> None:
        self.models = {} if models is None else models
        os.environ["OMP_NUM_THREADS"] = "1"
        self.connections, self.close = fork_servers(size, _prepare, _serve)

    @property
    def pids(self) -> list[int]:
        return Group(self.connections, ParallelLayout(dp=len(self.connections))).call("pid")

    @contextmanager
    def group(
        self, layout: ParallelLayout, config: Config, timeout_s: float = 60.0, kind: str = "megatron policy"
    ) -> Iterator[Group]:
        """Sets up workers of a kind (`KINDS` of `train_workers`) and shuts them down at the end."""
        group = Group(self.connections[: layout.world_size], layout)
        address = f"127.0.0.1:{reserve_port()}"
        contexts = [WorkerContext("train", rank, layout, config.seed, timeout_s) for rank in range(layout.world_size)]
        group.call("new", per_rank=[(context, config, address, kind) for context in contexts])
        try:
            yield group
        finally:
            group.call("shutdown")


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)
    from tests.integration.train_workers import TestedFsdpWorker, TestedMegatronWorker

    for worker in (TestedMegatronWorker, TestedFsdpWorker):
        worker.backend_class.prepare()


def _serve(connection: Connection) -> None:
    from tests.integration.train_workers import KINDS, gradients_alone

    worker: Any = None
    while (message := connection.recv()) is not None:
        method, args, warmup = message
        try:
            with gradients_alone() if warmup == "whole" else replay_context(ReplayContext("test", 0, warmup)):
                if method == "new":
                    place, config, address, kind = args
                    worker, value = KINDS[kind](place, config), None
                    worker.setup(address)
                elif method == "pid":
                    value = os.getpid()
                else:
                    value = getattr(worker, method)(*args)
            connection.send((None, value))
        except Exception as error:
            connection.send(((type(error).__name__, f"{error}\n{traceback.format_exc()}"), None))
