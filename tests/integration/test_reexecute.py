"""Steps executed again from their records by Megatron and vLLM, also those of a run with weight updates in flight."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from dagrl.cli.replay import report
from dagrl.run.loops.recorded import turns_of
from dagrl.run.reexecute import Request, replay_step
from dagrl.run.train import train
from dagrl.telemetry.rollouts import RolloutFiles, read_rollouts, rollout_files
from tests.integration.main_job import SFT_STEPS, Run
from tests.integration.test_async_grpo import one_cluster
from tests.integration.test_async_job import configuration

STEP = 4
TWO_RANKS = ("policy.megatron_cfg.data_parallel_size=1", "policy.megatron_cfg.tensor_model_parallel_size=2")


@pytest.fixture(scope="module")
def run(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run of 4 steps with a checkpoint after the second and the last."""
    pytest.importorskip("vllm")
    output = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        one_cluster.__wrapped__(cluster, patch)
        train(configuration(output, "kept, saved", "checkpointing.save_period=2"))
    rows = read_rollouts(rollout_files(output / "job" / "rollouts")[STEP])
    assert any(turn.known < turn.end for row in rows for turn in turns_of(row)), "no update was in flight"
    return output / "job"


def again(run: Path, monkeypatch: pytest.MonkeyPatch, phase: str | None = None, overrides: Sequence[str] = ()) -> Request:
    one_cluster.__wrapped__(None, monkeypatch)
    return Request(run, STEP, phase, overrides=overrides)


@pytest.mark.slow
def test_a_phase_in_another_layout_is_within_bounds(learned: Run, cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas become two ranks, which sum in another order. No generation worker starts."""
    one_cluster.__wrapped__(None, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    request = Request(learned.directory, SFT_STEPS + 2, "train_step", cpu=True, overrides=TWO_RANKS)
    found = replay_step(request, train)
    assert [one.describe() for one in found.differences] == []
    assert (found.first_step, found.last_step) == (SFT_STEPS + 1, SFT_STEPS + 2)
    assert 0 < found.largest["grad_norm"] < 1e-3
    assert "  grad_norm: differs by at most " in report(found)


@pytest.mark.slow
def test_an_asynchronous_step_is_bit_equal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation by several versions, log-probabilities, the optimizer step, and the weights of the checkpoint after it."""
    found = replay_step(again(run, monkeypatch), train)
    assert [one.describe() for one in found.differences] == []
    rows = read_rollouts(rollout_files(run / "rollouts")[STEP])
    assert found.tokens == 2 * sum(len(row["tokens"]) for row in rows), "generation, and log-probabilities"
    assert found.weights > 10 and found.metrics > 5
    assert found.first_step <= STEP == found.last_step


@pytest.mark.slow
def test_at_another_layout_it_is_within_bounds(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replay_step(again(run, monkeypatch, overrides=TWO_RANKS), train)
    assert [one.describe() for one in found.differences] == []
    assert 0 < found.largest["train_logprobs"] < 1e-4 and 0 < found.largest["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["generate", "logprobs", "train_step"])
def test_a_phase_alone_finds_a_change_of_its_own_records(
    run: Path, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "job"
    shutil.copytree(run, copy)
    rows = read_rollouts(rollout_files(copy / "rollouts")[STEP])
    long = [place for place, row in enumerate(rows) if len(row["tokens"]) > 2]
    # With a negative advantage the ratio is clipped; elsewhere the importance weight gains what it loses, so the loss stays.
    sample = min(long, key=lambda place: rows[place]["advantage"])
    assert rows[sample]["advantage"] < 0
    rows[sample]["train_logprobs"][2] += 0.5
    RolloutFiles(copy / "rollouts", max_bytes=None, resumed_step=STEP).write(STEP, rows)
    found = replay_step(again(copy, monkeypatch, phase), train)
    names = [one.describe().partition(" was ")[0] for one in found.differences]
    if phase == "generate":
        assert names == []
    elif phase == "logprobs":
        assert names == [f"step {STEP}: train_logprobs of sample {sample} at token 2"]
    else:  # the changed input changes the step, and then the weights
        assert names[0] == f"step {STEP}: loss" and any(" of train worker 0 at " in name for name in names)
