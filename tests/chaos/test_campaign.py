"""The campaign in short: a worker is killed and the run goes on; the next death ends it, as no restart is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.trial import Trial


def test_a_killed_worker_restarts_the_run_and_the_last_one_is_named(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    usual = SCENARIOS["sft"]
    scenario = replace(usual, overrides=(*usual.overrides, "sft.max_num_steps=1000", "max_restarts=1"))
    trial = Trial(scenario, tmp_path, "killed", Random(0), None)  # noqa: S311
    trial.in_start = False
    trial.launch()
    try:
        first, last = (trial.disturb(FAULTS["SIGKILL train worker"], resume=False) for _ in range(2))
    finally:
        trial.end()
    assert first is not None and (first.outcome, first.wrong) == ("restarted", [])
    assert last is not None and (last.outcome, last.exit_code, last.wrong) == ("stopped", 1, [])
    assert f"{last.did}) died in" in last.message
