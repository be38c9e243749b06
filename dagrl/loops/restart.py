"""Going on after a lost worker: the run begins again from its newest checkpoint (`on_failure: restart`)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dagrl.config import Config
from dagrl.errors import ConfigError, DeadlineError, WorkerError

logger = logging.getLogger(__name__)


def run_with_restarts(run: Callable[[Config], None], config: Config) -> None:
    """`run(config)`; when a worker raised, died or hung, again from the newest checkpoint, `max_restarts` times at most.

    A failed run has ended all its workers by the time that it raises: survivors of a broken collective have nothing that a
    checkpoint lacks. Raises ConfigError where there would be no checkpoint to begin from, and the last failure.
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
            logger.warning("going on from the newest checkpoint (%d more restarts) after: %s", left - 1, error)
            resumed = config.checkpointing.model_copy(update={"resume": True})
            config = config.model_copy(update={"checkpointing": resumed})
