"""Trains: `dagrl train`.

run_with_restarts(train, config)     # attempts, until the run ends or no restart is left
train(config)                        # one attempt: a session (`dagrl.run.start`), and in it the algorithm's loop
"""

import logging
from typing import Protocol

from dagrl.config import Config
from dagrl.errors import ClusterError, DeadlineError, WorkerError
from dagrl.run.fleet import Fleet
from dagrl.run.fork_server import Server
from dagrl.run.loops.grpo import train_samples
from dagrl.run.loops.preferences import train_preferences
from dagrl.run.loops.sft import train_sft
from dagrl.run.resume import NoStepsLeftError
from dagrl.run.session import LastStep
from dagrl.run.start import run_session

logger = logging.getLogger(__name__)

LOOPS = {"samples": train_samples, "demonstrations": train_sft, "preferences": train_preferences}
"""By what an algorithm learns from."""


def train(config: Config, last_step: LastStep | None = None, fleet: Fleet | None = None) -> None:
    """Runs the steps that are left, from the start or the newest checkpoint, up to `last_step` (None: all)."""
    try:
        with run_session(config, last_step, fleet) as session:
            LOOPS[session.plan.learns_from](session)
    except NoStepsLeftError as ended:
        logger.info("%s", ended)


class Run(Protocol):
    """Runs the steps that are left with the workers of `fleet`, which may be those of a run that failed."""

    def __call__(self, config: Config, *, fleet: Fleet) -> None: ...


def run_with_restarts(run: Run, config: Config, server: Server | None = None) -> None:
    """Calls `run`; again from the newest checkpoint if a worker raised, died or hung, or a process of Ray
    ended, up to `max_restarts` times (`on_failure: restart`), with the workers of the fleet that can go on.

    `server` may import already what workers need. Ray stays alive between two calls, unless it is broken. Raises the last
    failure, and one in which nothing was lost before the attempt's first step: it would come again.
    """
    restarts = config.max_restarts if config.on_failure == "restart" else 0
    with Fleet(restarts, server) as fleet:
        while True:
            try:
                run(config, fleet=fleet)
                return
            except (WorkerError, DeadlineError, ClusterError) as error:
                if not fleet.restarts or not config.checkpointing.enabled or not (fleet.progressed or _lost(error)):
                    raise
                fleet.restarts -= 1
                fleet.progressed = False
                logger.warning("restarting from the newest checkpoint (%d restarts left) after: %s", fleet.restarts, error)
                config = config.with_keys({"checkpointing.resume": True})


def _lost(error: WorkerError | DeadlineError | ClusterError) -> bool:
    """Returns whether a process was lost: a worker died or hung, or Ray ended."""
    if isinstance(error, WorkerError):
        return any(failure.kind != "raised" for failure in error.failures)
    return isinstance(error, ClusterError)
