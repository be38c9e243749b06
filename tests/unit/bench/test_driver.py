"""The driver's part of a step, as `bench/bench_step.py` measures it: real batches and files of all samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dagrl.bench.driver import GROUP, DriverStep
from dagrl.telemetry.rollouts import read_rollouts, rollout_files


def test_all_samples_reach_the_batch_and_the_file(tmp_path: Path) -> None:
    step = DriverStep(samples=24, prompt=5, completion=7)
    groups = step.generate()
    scored = step.score(groups)
    batch = step.batch(scored)
    step.keep(scored, batch, tmp_path)
    rows = read_rollouts(rollout_files(tmp_path)[1])
    assert len(rows) == batch.rows == 24 and len(groups) == 24 // GROUP
    assert batch["loss_mask"].sum() == 24 * 7 and set(batch["lengths"].tolist()) == {12}
    for row, tokens in zip(rows, batch["tokens"], strict=True):
        assert row["tokens"] == tokens[5:].tolist() and row["completion"] == "".join(row["token_texts"])
    advantages = np.where(batch["loss_mask"] > 0, batch["advantages"], 0).sum(1)
    assert [row["reward"] for row in rows[:2]] == [0.0, 1.0] and advantages[0] < 0 < advantages[1]
