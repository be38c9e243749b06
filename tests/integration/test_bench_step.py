"""`dagrl bench step` with simulated devices: three variants, one burst of steps, plausible rows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from dagrl.bench import step
from dagrl.errors import ConfigError
from dagrl.telemetry.metrics import VALIDATION
from tests.integration.test_async_grpo import one_cluster

__all__ = ["one_cluster"]  # a fixture

SIMULATED = Path(step.__file__).with_name("step_simulated.yaml")
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "policy.train_global_batch_size=16",
    "policy.max_total_sequence_length=48",
    "policy.generation.max_new_tokens=32",
    "policy.generation.forced_lengths.median=8",
    "data.task_args={count: 16, train_s: 0.02, engine_step_s: 0.002}",
)
WORKERS = 3  # one trains, two generate


def test_rows_of_three_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[step.Metrics] = []
    run_variant = step.run_variant

    def watched(*words: Any) -> Any:
        taken = run_variant(*words)
        counted.extend(taken)
        return taken

    monkeypatch.setattr(step, "run_variant", watched)
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    rows_file = tmp_path / "rows.json"
    options = ["--config", str(SIMULATED), "--json", str(rows_file), "--rounds", "1", "--steps", "1"]
    variants = ("sync, fifo", "sync", "in flight, age 1")
    step.run(parser.parse_args([*SMALL, *options, "--variants", "; ".join(variants)]))
    rows = json.loads(rows_file.read_text())["rows"]
    assert tuple(row["variant"] for row in rows) == variants
    fifo, sync, in_flight = rows
    assert (fifo["policy_age_max"], fifo["speedup"], sync["policy_age_max"]) == (0, 1, 0)
    assert len(counted) == 1 + 1 + 2
    assert not [name for steps in counted for name in steps if name.startswith(VALIDATION)], "validation never counts"
    assert 0 <= in_flight["policy_age_mean"] <= in_flight["policy_age_max"] <= 1
    for row, steps in ((fifo, 1), (sync, 1), (in_flight, 2)):  # a burst at age 1 has two steps
        assert (row["rounds"], row["steps"]) == (1, steps)
        tokens, sequences = row["tokens_per_s"] * row["step_s"] * steps, 16 * steps
        assert tokens == pytest.approx(round(tokens)) and sequences * 3 <= tokens <= sequences * 48, "whole tokens"
        assert row["tokens_per_s_per_worker"] == pytest.approx(row["tokens_per_s"] / WORKERS)
        assert all(0 <= row[name] <= 1 for name in ("idle_train", "idle_generation", "quantum_overhead"))
        assert 0 <= row["exposed_generation_s"] < row["step_s"] and 0 < row["update_s"] < row["step_s"]


def test_an_unknown_variant_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"found asynk; choose from plain Ray; .*sync"):
        step.chosen("sync; asynk")
