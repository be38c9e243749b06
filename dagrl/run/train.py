"""Runs the loop that an algorithm learns in: `dagrl train`, and the steps that `dagrl replay` executes again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagrl.config import Config
from dagrl.config.settings import load_algorithm

if TYPE_CHECKING:
    from dagrl.run.fleet import Fleet
    from dagrl.run.session import LastStep


def train(config: Config, last_step: LastStep | None = None, fleet: Fleet | None = None) -> None:
    """Runs the steps that are left, from the start or the newest checkpoint, up to `last_step` (None: all).

    `fleet` may keep workers of an attempt that failed (`dagrl.run.restart`).
    """
    from dagrl.run.loops.grpo import run_grpo
    from dagrl.run.loops.preferences import run_preferences
    from dagrl.run.loops.sft import run_sft

    loops = {"samples": run_grpo, "demonstrations": run_sft, "preferences": run_preferences}
    loops[load_algorithm(config).learns_from](config, last_step, fleet)
