"""Runs the loop that an algorithm learns in: `dagrl train`, and the steps that `dagrl replay` executes again."""

from __future__ import annotations

from dagrl.config import Config
from dagrl.config.settings import generates


def train(config: Config, last_step: int | None = None) -> None:
    """Runs the steps that are left, from the start or the newest checkpoint, up to `last_step` (None: all)."""
    from dagrl.run.loops.grpo import run_grpo
    from dagrl.run.loops.sft import run_sft

    run = run_grpo if generates(config) else run_sft
    run(config, last_step)
