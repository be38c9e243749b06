"""The picture of a run has the panels of the metrics that the run has."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from dagrl.errors import DataError
from dagrl.telemetry.plot import draw_run, plot_run

Line = dict[str, float | str | None]


def sft_lines(count: int) -> list[Line]:
    lines: list[Line] = []
    for step in range(1, count + 1):
        line: Line = {"step": step, "stage": "sft", "time": 0.0, "loss": 2.2 * math.exp(-step / 12) + 0.3}
        line |= {"timing_s/total": 0.5, "timing_s/train_step": 0.45, "timing_s/data": 0.02}
        if step % 10 == 1:
            line["validation/loss"] = 2.3 * math.exp(-step / 12) + 0.33
        lines.append(line)
    return lines


def grpo_lines(first: int, count: int) -> list[Line]:
    random = np.random.default_rng(0)
    lines: list[Line] = []
    for step in range(first, first + count):
        progress = (step - first) / count
        line: Line = {
            "step": step,
            "stage": "grpo",
            "time": 0.0,
            "loss": 0.01 * random.normal(),
            "policy/kl": 0.2 * progress,
        }
        line |= {
            "reward/mean": 0.3 + 0.6 * progress + 0.04 * random.normal(),
            "token_mult_prob_error": 1 + 1e-6 * random.random(),
        }
        line |= {"max_logprob_difference": 1e-5 * random.random(), "timing_s/generate": 0.9 + 0.1 * random.random()}
        line |= {"timing_s/train_step": 0.6, "timing_s/logprobs": 0.3, "timing_s/refit": 0.05, "timing_s/total": 2.1}
        if step % 10 == 0:
            line["validation/reward"] = 0.3 + 0.65 * progress
        lines.append(line)
    return lines


def written(tmp_path: Path, lines: list[Line]) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def drawn(path: Path) -> dict[str, Axes]:
    return {axis.get_title(loc="left"): axis for axis in draw_run(path, "a run").axes}


def test_panels_of_sft_then_grpo(tmp_path: Path) -> None:
    lines = sft_lines(40) + grpo_lines(41, 80)
    axes = drawn(written(tmp_path, lines))
    assert list(axes) == [
        "Reward",
        "Loss (SFT)",
        "Loss (GRPO)",
        "KL to the reference policy",
        "Generation against train probabilities",
        "Seconds of each step, by phase",
    ]
    raw, mean, held_out = axes["Reward"].lines
    np.testing.assert_array_equal(raw.get_xdata(), np.arange(41, 121))
    np.testing.assert_array_equal(held_out.get_xdata(), np.arange(50, 121, 10))
    labels = axes["Seconds of each step, by phase"].get_legend_handles_labels()[1]
    assert labels == ["generate", "train_step", "logprobs", "refit", "data", "other"]
    heights = sum(patch.get_height() for patch in axes["Seconds of each step, by phase"].patches)
    assert heights == pytest.approx(40 * 0.5 + 80 * 2.1), "the bands add up to the wall time"
    rewards = [float(line["reward/mean"] or 0) for line in lines if "reward/mean" in line]
    means = [sum(rewards[max(0, end - 5) : end]) / min(end, 5) for end in range(1, 81)]
    np.testing.assert_allclose(mean.get_ydata(), means, err_msg="80 steps have a trailing mean of 5")


@pytest.mark.parametrize("lines", [sft_lines(30), grpo_lines(1, 1), sft_lines(1) + grpo_lines(2, 3)])
def test_a_picture_is_written(tmp_path: Path, lines: list[Line]) -> None:
    picture = tmp_path / "metrics.png"
    plot_run(written(tmp_path, lines), picture, "a run")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_values_that_are_not_finite_are_skipped(tmp_path: Path) -> None:
    lines: list[Line] = [{"step": step, "stage": "sft", "loss": None if step == 2 else 1.0} for step in (1, 2, 3)]
    (axis,) = drawn(written(tmp_path, lines)).values()
    np.testing.assert_array_equal(axis.lines[0].get_xdata(), [1, 3])


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no step"):
        plot_run(written(tmp_path, []), tmp_path / "metrics.png", "empty")
