"""`dagrl attach`: takes over the workers of a run whose driver has died, and goes on (`timeouts.orphan_s`)."""

from __future__ import annotations

from pathlib import Path

from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.errors import ConfigError
from dagrl.run.leased_cluster import nothing_waits, read_lease
from dagrl.telemetry.record import RunPaths, check_not_running


def orphaned_config(directory: Path) -> Config:
    """Returns the configuration of a run whose workers may wait for a driver.

    Raises ConfigError if `directory` is no run's, if its driver lives, or if no workers can wait.
    """
    directory = directory.absolute()
    file = directory / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{directory} has no config.yaml; expected the directory of a run, such as runs/grpo_quickstart")
    config = load_config(file)
    moved = {"output_dir": str(directory.parent), "name": directory.name, "checkpointing.resume": True}
    config = config.with_keys(moved)
    check_not_running(RunPaths.of(config), "only a run whose driver has died can be attached to")
    lease = read_lease(directory)
    if lease is None or not lease.may_wait(directory):
        raise nothing_waits(directory)
    return config
