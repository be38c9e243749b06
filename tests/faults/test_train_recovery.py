"""Train workers that die and continue with their peers' state: real Megatron, two data-parallel replicas, SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from dagrl.errors import WorkerError
from dagrl.graphs.train import demonstration_step
from dagrl.run.fleet import Fleet
from dagrl.run.loops.optimizer_step import replay_batch
from dagrl.run.replays import Replays
from dagrl.run.train_recovery import TrainRecovery, state_sources
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.options import SchedulerOptions
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.shapes import Bucket
from dagrl.runtime.worker import current_replay, in_warmup
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.timing import PhaseClock
from dagrl.workers.megatron import MegatronWorker
from tests.integration.megatron_reference import VOCABULARY, make_batch, make_config, make_model

pytest.importorskip("megatron.core")

STEPS, DP2 = 6, ParallelLayout(dp=2)
BEFORE_ITS_ALL_REDUCE, AFTER_AN_UPDATE = "before", "after"


class Mortal(MegatronWorker):
    """Dies in the replay of a number, before the gradients are summed, or after its update."""

    dies: tuple[int, str] = (-1, "")

    def die_in(self, rank: int, replay: int, when: str) -> None:
        if rank == self.context.rank:
            self.dies = replay, when

    def setup(self, address: str) -> None:
        super().setup(address)
        settings = self._ready().model.config
        reduce_gradients = settings.finalize_model_grads_func

        def die_or_reduce(*args: Any, **kwargs: Any) -> None:
            self._die_if(BEFORE_ITS_ALL_REDUCE)
            reduce_gradients(*args, **kwargs)

        settings.finalize_model_grads_func = die_or_reduce

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        metrics = super().train_step(*args, **kwargs)
        self._die_if(AFTER_AN_UPDATE)
        return metrics

    def _die_if(self, when: str) -> None:
        if not in_warmup() and (current_replay().replay, when) == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)


def run(recovery: TrainRecovery, deaths: Mapping[int, str] = {}) -> list[Mapping[str, float]]:
    """Takes the steps; `deaths` are when a worker dies in some of them. Returns the metrics without times."""
    found = []
    for step in range(STEPS):
        batch = make_batch()
        batch = batch.select(np.roll(np.arange(batch.rows), step)[: batch.rows - step % 3].tolist())
        when = deaths.get(step)
        number = recovery.replays.scheduler.next_replays()[demonstration_step.name]
        if when == "between":
            os.kill(recovery.group.locations[0].pid, signal.SIGKILL)
        elif when is not None:
            recovery.group.call("die_in", 1, number, when)
        metrics = recovery.run(partial(replay_batch, recovery.replays, "demonstration_step", batch, step=step)).flat()
        found.append({name: value for name, value in metrics.items() if not name.startswith("perf/")})
    return found


def state(group: WorkerGroup) -> list[tuple[list[bytes], dict[str, Any]]]:
    """Weights, optimizer state and counters of every worker, to compare."""
    return [([part.tobytes() for part in one.tensors], one.counters["trainer"]) for one in group.call("copy_state")]


IN_A_STEP = {2: BEFORE_ITS_ALL_REDUCE}


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "deaths", [IN_A_STEP, pytest.param({**IN_A_STEP, 4: "between"}, marks=pytest.mark.slow)], ids=["once", "twice"]
)
def test_a_worker_that_dies_goes_on_from_its_peers_state(deaths: dict[int, str], cluster: None, tmp_path: Path) -> None:
    """In a step, before any weight has changed, and between steps: the end is that of an undisturbed run, bit for bit."""
    config = make_config(make_model("qwen3", tmp_path), megatron_cfg={"data_parallel_size": 2})
    group = WorkerGroup.create("train", Mortal, DP2, config, collective_timeout_s=20.0, spares=1)
    options = SchedulerOptions(fallback="error", teardown_s=4.0, replay_s=60.0, grace_s=5.0)
    try:
        with Scheduler([group], options) as scheduler, Fleet(restarts=3) as fleet:
            scheduler.add(
                demonstration_step,
                buckets=[Bucket(4, 32)],
                scalars={"global_valid_tokens": 1.0, "global_valid_sequences": 1.0},
                token_ids=VOCABULARY,
            )
            scheduler.compile()
            scheduler.warmup()
            group.fill_spares()
            replays = Replays({"demonstration_step": demonstration_step}, scheduler, PhaseClock(None), 2)
            dropped: list[None] = []
            recovery = TrainRecovery(config, fleet, group, replays, None, lambda: dropped.append(None))
            start = group.actors[0].copy_state.remote()
            expected, ended = run(recovery), state(group)
            assert ended[0] == ended[1]
            ray.get([actor.restore_state.remote(start) for actor in group.actors])
            assert run(recovery, deaths) == expected
            assert state(group) == ended
            assert fleet.restarts == 3 - len(deaths) == 3 - len(dropped)
            with pytest.raises(WorkerError, match=r"train worker 1 .* died"):  # the other one has the weights after it
                run(recovery, {0: AFTER_AN_UPDATE})
            assert fleet.restarts == 3 - len(deaths)
    finally:
        group.shutdown(2.0)


def test_state_comes_from_a_worker_with_the_same_part_of_the_model() -> None:
    assert state_sources(DP2, [1]) == {0: 1, 1: 1}
    layout = ParallelLayout(dp=2, tp=2, pp=2)  # ranks: stage, replica, tp
    assert state_sources(layout, [0, 1, 2, 5, 6]) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 6, 5: 5, 6: 6, 7: 5}
    assert state_sources(layout, [0, 2, 4, 5, 6, 7]) == {0: 0, 2: 0, 4: 4, 5: 5, 6: 4, 7: 5}, "no replica of tp 1 lives"
    experts = ParallelLayout(dp=2, ep=2)  # each replica of the dense part has other experts
    assert state_sources(experts, [0]) == {0: 0}
