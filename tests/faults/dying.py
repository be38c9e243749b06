"""Workers that kill themselves once, by SIGKILL, at a requested place and policy version.

`DAGRL_DEATHS` is a directory. A file `<place>.<version>` in it requests a death; when it happens, the file is renamed to
`<place>.died` and holds the time. Places: `all_reduce` (a train worker dies while its peers wait for it in the gradient
reduction), `quantum` (a generation worker, in the second engine step of a quantum), `refit` (a generation worker, while
senders wait for it).
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from dagrl.runtime.worker import in_warmup
from dagrl.workers.megatron import MegatronWorker
from dagrl.workers.megatron.backend import MegatronBackend
from dagrl.workers.vllm.worker import VllmWorker

DEATHS = "DAGRL_DEATHS"
PLACES = ("all_reduce", "quantum", "refit")
STEPS_INTO_A_QUANTUM = 2  # on GPUs the second step is a burst, which ends a short quantum


def ask_for_death(directory: Path, place: str, version: int) -> None:
    """Requests a worker's death at `place` after `version` trained steps (refit: when generation is to receive that
    version)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{place}.{version}").touch()


def died_at(directory: Path, place: str) -> float:
    """Returns the time of death, in seconds since the epoch."""
    return float((directory / f"{place}.died").read_text())


def die_if_asked(place: str, version: int) -> None:
    wish = Path(os.environ[DEATHS]) / f"{place}.{version}"
    if wish.exists():
        wish.write_text(repr(time.time()))
        wish.rename(wish.with_name(f"{place}.died"))
        os.kill(os.getpid(), signal.SIGKILL)


class DyingMegatronWorker(MegatronWorker):
    """The last train worker dies before its all-reduce."""

    _steps = 0  # steps of this process

    def setup(self, address: str) -> None:
        super().setup(address)
        if self.context.rank == self.context.layout.world_size - 1:
            settings = cast(MegatronBackend, self.backend()).trainer.model.config
            reduce_gradients = settings.finalize_model_grads_func

            def die_or_reduce(*args: Any, **kwargs: Any) -> None:
                if not in_warmup():
                    die_if_asked("all_reduce", self._steps)
                    self._steps += 1
                reduce_gradients(*args, **kwargs)

            settings.finalize_model_grads_func = die_or_reduce


class DyingVllmWorker(VllmWorker):
    """Generation worker 0 dies."""

    def setup(self, address: str) -> None:
        running = self._engine is not None  # since before a `reset`
        super().setup(address)
        if running:
            return
        engine = self._require_engine()._engine
        step, self._steps = engine.step, 0

        def die_or_step() -> Any:
            self._steps += 1
            if self._steps == STEPS_INTO_A_QUANTUM and self._dies:
                die_if_asked("quantum", self.version)
            return step()

        engine.step = die_or_step

    def generate(self, batch: Any) -> Any:
        self._steps = 0
        return super().generate(batch)

    @contextmanager
    def writing_weights(self, version: int, *rest: Any) -> Iterator[None]:
        with super().writing_weights(version, *rest):
            if self._dies:
                die_if_asked("refit", version)
            yield

    @property
    def _dies(self) -> bool:
        return self.context.rank == 0 and not in_warmup()
