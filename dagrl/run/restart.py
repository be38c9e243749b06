"""Restarts a run from its newest checkpoint after a worker failed (`on_failure: restart`)."""

from __future__ import annotations

import logging
from typing import Protocol

from dagrl.config import Config
from dagrl.errors import ClusterError, ConfigError, DeadlineError, WorkerError
from dagrl.run.fleet import Fleet

logger = logging.getLogger(__name__)


class Run(Protocol):
    """Runs the steps that are left with the workers of `fleet`, which may be those of a run that failed."""

    def __call__(self, config: Config, *, fleet: Fleet) -> None: ...


def run_with_restarts(run: Run, config: Config, *, attach: bool = False) -> None:
    """Calls `run`; again from the newest checkpoint if a worker raised, died or hung, or a process of Ray ended, up to
    `max_restarts` times. `attach`: the first time with the workers of a driver that has died.

    Ray and the workers that can go on stay alive between two calls, unless Ray itself is broken. Raises ConfigError if
    checkpoints are disabled, else the last failure.
    """
    restarts = config.max_restarts if config.on_failure == "restart" else 0
    if restarts and not config.checkpointing.enabled:
        raise ConfigError("on_failure is 'restart', but checkpointing.enabled is false: set it to true, or on_failure=stop")
    with Fleet(restarts, attach=attach) as fleet:
        while True:
            try:
                run(config, fleet=fleet)
                return
            except (WorkerError, DeadlineError, ClusterError) as error:
                if not fleet.restarts:
                    raise
                fleet.restarts -= 1
                logger.warning("restarting from the newest checkpoint (%d restarts left) after: %s", fleet.restarts, error)
                config = config.with_keys({"checkpointing.resume": True})
