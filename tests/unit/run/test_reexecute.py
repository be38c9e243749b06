"""Steps executed again: differing records are named, the nearest to the cause first; what cannot be executed is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.errors import ConfigError, RunError
from dagrl.machine import gpu_count
from dagrl.run.checkpoint_store import CheckpointStore, TrainState
from dagrl.run.comparison import BOUNDS, EXACT, Bounds, WeightDifference, compare
from dagrl.run.reexecute import Request, newest_checkpoint, on_cpu, replay_step
from dagrl.run.session import LastStep
from dagrl.telemetry.record import read_metrics
from dagrl.telemetry.rollouts import RolloutFiles, read_rollouts, rollout_files
from tests.unit.telemetry.made_run import make_run


def change(run: Path, step: int, sample: int, column: str, token: int | None, value: object) -> None:
    """Replaces one value of the rollouts."""
    rows = read_rollouts(rollout_files(run / "rollouts")[step])
    if token is None:
        rows[sample][column] = value
    else:
        rows[sample][column][token] = value
    RolloutFiles(run / "rollouts", max_bytes=None, resumed_step=step).write(step, rows)


def change_metric(run: Path, step: int, name: str, value: float) -> None:
    lines: list[dict[str, Any]] = [dict(line) for line in read_metrics(run / "metrics.jsonl")]
    lines[step - 1][name] = value
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def differences(old: Path, new: Path, bounds: Bounds = EXACT) -> list[str]:
    found = compare(old, new, read_metrics(old / "metrics.jsonl"), step=2, bounds=bounds)
    return [difference.describe() for difference in found.differences]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return make_run(tmp_path, "old"), make_run(tmp_path, "new")


def test_equal_runs_are_equal_whatever_the_clock_says(runs: tuple[Path, Path]) -> None:
    old, new = runs
    change_metric(new, 2, "timing_s/total", 9.0)
    assert differences(old, new) == []


def test_one_bit_of_a_logprob_is_found(runs: tuple[Path, Path]) -> None:
    old, new = runs
    value = np.float32(read_rollouts(rollout_files(old / "rollouts")[2])[1]["logprobs"][3])
    change(new, 2, 1, "logprobs", 3, float(np.nextafter(value, np.float32(0))))
    (found,) = differences(old, new)
    assert re.match(r"step 2: logprobs of sample 1 at token 3 was -1\.38\d+, and is now -1\.38\d+", found)


def test_the_difference_nearest_to_the_cause_comes_first(runs: tuple[Path, Path]) -> None:
    old, new = runs
    change_metric(new, 2, "loss", 0.75)
    change(new, 2, 2, "reward", None, 1.0)
    change(new, 2, 3, "tokens", 4, 77)
    assert [text.split(" was ")[0] for text in differences(old, new)] == [
        "step 2: tokens of sample 3 at token 4",
        "step 2: reward of sample 2",
        "step 2: loss",
    ]


def test_a_step_that_was_not_executed_is_an_error(tmp_path: Path) -> None:
    old, new = make_run(tmp_path, "old"), make_run(tmp_path, "new", steps=1)
    with pytest.raises(RunError, match="step 2 was not executed"):
        differences(old, new)


def test_it_starts_from_the_newest_checkpoint_before_the_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (2, 4, 6):
        with store.saving(TrainState(step)):
            pass
    found = [newest_checkpoint((tmp_path / "moved", tmp_path / "checkpoints"), range(step)) for step in (2, 3, 6, 9)]
    assert [path and path.name for path in found] == [None, "step_00000002", "step_00000004", "step_00000006"]


def test_within_bounds_what_differs_more_is_named(runs: tuple[Path, Path]) -> None:
    old, new = runs
    bounds = BOUNDS["float32"]
    rows = read_rollouts(rollout_files(old / "rollouts")[2])
    change(new, 2, 1, "train_logprobs", 3, rows[1]["train_logprobs"][3] + bounds.nats / 2)
    change_metric(new, 2, "loss", 0.25 * (1 + bounds.relative / 2))
    assert differences(old, new, bounds) == []
    assert len(differences(old, new)) == 2
    change(new, 2, 1, "train_logprobs", 4, rows[1]["train_logprobs"][4] + bounds.nats * 2)
    assert [text.partition(" was ")[0] for text in differences(old, new, bounds)] == [
        "step 2: train_logprobs of sample 1 at token 4"
    ]


def test_within_bounds_few_sequences_may_go_on_with_another_token(runs: tuple[Path, Path]) -> None:
    """What follows such a token is not compared: another sequence has other log-probabilities."""
    old, new = runs
    rows = read_rollouts(rollout_files(old / "rollouts")[2])
    change(new, 2, 1, "tokens", 5, 77)
    change(new, 2, 1, "logprobs", 6, rows[1]["logprobs"][6] - 3.0)
    assert differences(old, new, BOUNDS["float32"]) == []
    for sample in (0, 2, 3):
        change(new, 2, sample, "tokens", 7, 77)
    assert [text.partition(" was ")[0] for text in differences(old, new, BOUNDS["float32"])] == [
        "step 2: tokens of sample 0 at token 7"
    ]


def test_weights_may_differ_by_what_adam_does_to_a_gradient_of_either_sign(runs: tuple[Path, Path]) -> None:
    old, new = runs
    one = WeightDifference("decoder.layers.1.mlp.linear_fc1.weight", 3, (0, 5), 0.25, 0.2521, 2.1e-3, 1.0)
    for bounds, step_size, fits in ((BOUNDS["float32"], 1e-3, False), (BOUNDS["float32"], 2e-3, True), (EXACT, 1.0, False)):
        found = compare(old, new, read_metrics(old / "metrics.jsonl"), step=2, bounds=bounds)
        found.add_weights(26, [one], step_size)
        told = "step 2: decoder.layers.1.mlp.linear_fc1.weight of train worker 3 at [0, 5] was 0.25, and is now 0.2521"
        assert [each.describe() for each in found.differences] == ([] if fits else [told])


def test_a_run_of_gpus_is_executed_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "name: run\nalgorithm: grpo\ndata: {}\ncluster: {address: auto, gpus_per_worker: 1}\npolicy:\n"
        "  megatron_cfg: {cuda_graphs: true, tensor_model_parallel_size: 4}\n  precision: bfloat16\n"
        "  generation: {colocated: {enabled: true}, vllm_cfg: {precision: fp8, enforce_eager: false}}"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = on_cpu(load_config(file))
    assert gpu_count() == 0 and config.cluster.gpus_per_worker == 0 and config.cluster.address is None
    generation, megatron = config.policy.generation, config.policy.megatron_cfg
    assert generation is not None and not generation.colocated.enabled and not megatron.cuda_graphs
    assert generation.vllm_cfg.enforce_eager and generation.vllm_cfg.precision is None
    assert megatron.layout.tp == 4 and config.policy.precision == "bfloat16", "the run's own"


def never(config: Config, step: LastStep) -> None:
    raise AssertionError("nothing may start")


def test_what_cannot_be_executed_is_said_before_anything_starts(tmp_path: Path) -> None:
    run = make_run(tmp_path, "run")
    with pytest.raises(ConfigError, match=r"no config\.yaml; expected the directory of a run"):
        replay_step(Request(tmp_path, 1), never)
    (run / "config.yaml").write_text("name: run\nalgorithm: grpo\npolicy: {}\ndata: {}\n")
    with pytest.raises(ConfigError, match=r"--step 3: .* has recorded steps 1 to 2"):
        replay_step(Request(run, 3), never)
    with pytest.raises(ConfigError, match=r"--phase generate: step 2 can be executed again by the phase demonstration_step"):
        replay_step(Request(run, 2, "generate"), never)
    (run / "config.yaml").write_text("name: run\nalgorithm: grpo\npolicy: {}\ndata: {}\nsft: {max_num_steps: 0}\n")
    with pytest.raises(ConfigError, match=r"--phase refit: the records have the inputs of generate, logprobs, .*train_step"):
        replay_step(Request(run, 2, "refit"), never)
    with pytest.raises(ConfigError, match=r"^unknown key policy\.nothing \(command line\)"):
        replay_step(Request(run, 2, overrides=("policy.nothing=1",)), never)
    routed = "name: run\nalgorithm: grpo\npolicy: {router_replay: true}\ndata: {}\nsft: {max_num_steps: 0}\n"
    (run / "config.yaml").write_text(routed)
    with pytest.raises(ConfigError, match="rollouts/ does not have the experts of each token"):
        replay_step(Request(run, 2, "train_step"), never)
