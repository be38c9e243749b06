"""Runs whose workers kill themselves by SIGKILL, compared with an undisturbed one of the same seed.

The disturbed run loses a train worker while its peers wait for it in an all-reduce, a generation worker in the second engine
step of a quantum, and one while senders wait for it in a refit. It goes on each time (`on_failure: restart`).

`DAGRL_DEATHS` is a directory. A file `<place>.<version>` in it requests a death; when it happens, the file is renamed to
`<place>.died` and holds the time.
"""

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dagrl.runtime.worker import in_warmup
from dagrl.workers.megatron import MegatronWorker
from dagrl.workers.megatron.backend import MegatronBackend
from dagrl.workers.vllm.worker import VllmWorker
from tests.integration.main_job import Metrics, running, steps_of

CONFIG = str(Path(__file__).with_name("killing.yaml"))
DEATH_AT = {"all_reduce": 2, "quantum": 4, "refit": 7}
"""Policy version at each death; training step `v` makes version `v`. In a refit, generation is to receive that version."""

DEATHS, PLACES = "DAGRL_DEATHS", tuple(DEATH_AT)
STEPS_INTO_A_QUANTUM = 2  # on GPUs the second step is a burst, which ends a short quantum
DYING = (
    "policy.worker=tests.faults.killing:DyingMegatronWorker",
    "policy.generation.worker=tests.faults.killing:DyingVllmWorker",
    "on_failure=restart",
)


@dataclass(frozen=True)
class Fault:
    """What came of a death. Differences are relative, the largest of the steps from the restart to the next death."""

    place: str
    resumed_from_step: int
    steps_compared: int
    loss_difference: float
    grad_norm_difference: float
    seconds: float
    """From the death to the end of the next step."""


def measure(directory: Path, overrides: Sequence[str], places: Sequence[str] = PLACES) -> list[Fault]:
    """Trains undisturbed and disturbed, and returns each fault."""
    deaths = directory / "deaths"
    deaths.mkdir(parents=True)
    for place in places:
        (deaths / f"{place}.{DEATH_AT[place]}").touch()
    runs = []
    for name, more in (("undisturbed", ()), ("disturbed", DYING)):
        with running(CONFIG, directory, name, *overrides, *more, **{DEATHS: str(deaths)}) as run:
            assert run.finish() == 0, run.shown
        runs.append({int(line["step"]): line for line in steps_of(run.directory)})
    theirs, ours = runs
    died = [float((deaths / f"{place}.died").read_text()) for place in places]
    return [_fault(*death, ours, theirs) for death in zip(places, died, [*died[1:], math.inf], strict=True)]


def _fault(place: str, died: float, until: float, ours: dict[int, Metrics], theirs: dict[int, Metrics]) -> Fault:
    compared = [step for step, line in ours.items() if died < line["time"] < until]
    loss, norm = (
        max(abs(ours[step][name] - theirs[step][name]) / max(abs(theirs[step][name]), 1e-9) for step in compared)
        for name in ("loss", "grad_norm")
    )
    return Fault(place, min(compared) - 1, len(compared), loss, norm, ours[min(compared)]["time"] - died)


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
