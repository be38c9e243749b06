"""Restarts a run from its newest checkpoint after a worker failed (`on_failure: restart`)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dagrl.config import Config
from dagrl.errors import ConfigError, DeadlineError, WorkerError

logger = logging.getLogger(__name__)


def run_with_restarts(run: Callable[[Config], None], config: Config) -> None:
    """Calls `run(config)`; again from the newest checkpoint if a worker raised, died or hung, up to `max_restarts` times.

    A failed run has ended all its workers when it raises. Survivors of a broken collective hold nothing that a checkpoint
    lacks. Raises ConfigError if checkpoints are disabled, else the last failure.
    """
    if config.on_failure == "stop":
        run(config)
        return
    if not config.checkpointing.enabled:
        raise ConfigError("on_failure is 'restart', but checkpointing.enabled is false: set it to true, or on_failure=stop")
    for left in reversed(range(config.max_restarts + 1)):
        try:
            run(config)
            return
        except (WorkerError, DeadlineError) as error:
            if not left:
                raise
            logger.warning("restarting from the newest checkpoint (%d restarts left) after: %s", left - 1, error)
            resumed = config.checkpointing.model_copy(update={"resume": True})
            config = config.model_copy(update={"checkpointing": resumed})
