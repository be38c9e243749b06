"""`dagrl attach`: takes over the workers of a run whose driver has died, and goes on (`timeouts.orphan_s`)."""

from __future__ import annotations

from pathlib import Path

from dagrl.config import Config
from dagrl.config.file import load_run_config
from dagrl.run.leased_cluster import waiting_lease
from dagrl.telemetry.record import RunPaths, check_not_running


def orphaned_config(directory: Path) -> Config:
    """Returns the configuration of a run whose workers may wait for a driver.

    Raises ConfigError if `directory` is no run's, if its driver lives, or if no workers can wait.
    """
    directory = directory.absolute()
    moved = {"output_dir": str(directory.parent), "name": directory.name, "checkpointing.resume": True}
    config = load_run_config(directory).with_keys(moved)
    check_not_running(RunPaths.of(config), "only a run whose driver has died can be attached to")
    waiting_lease(directory)
    return config
