"""Colocated workers: the order of their memory exchanges, and losses equal to those of separate devices."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from dagrl.config import Config
from dagrl.errors import ConfigError, StopRequestedError
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.trajectory_file import read_trajectories
from dagrl.run.loops.grpo import run_grpo
from dagrl.run.preflight import preflight
from tests.integration.test_async_grpo import configuration, one_cluster, steps_of
from tests.integration.unigram_workers import EXCHANGES

TO_TRAIN = [("generation", "sleep"), ("train", "reload")]
TO_REFIT = [("train", "offload"), ("generation", "wake_up")]
TO_GENERATE = [("train", "offload"), ("generation", "wake_up")]
COLOCATED = {"generation": {"colocated": {"enabled": True, "exchange": "always"}}}


def exchanges(config: Config) -> list[tuple[str, str, list[str], list[str]]]:
    lines = (Path(config.output_dir) / config.name / EXCHANGES).read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> dict[str, Config]:
    """The same synchronous run on separate devices, colocated, and colocated with a resume in between."""
    output = tmp_path_factory.mktemp("colocated")
    configs = {
        "apart": configuration(output, "apart"),
        "together": configuration(output, "together", policy=COLOCATED),
    }
    with pytest.MonkeyPatch.context() as patch:
        one_cluster.__wrapped__(cluster, patch)
        for config in configs.values():
            run_grpo(config)
    return configs


def test_losses_equal_those_on_separate_devices(runs: dict[str, Config]) -> None:
    names = ("step", "loss", "policy/kl", "reward/mean", "completion_tokens", "validation/reward")
    apart, together = ([[line.get(name) for name in names] for line in steps_of(config)] for config in runs.values())
    assert apart == together and len(apart) == 5
    assert all(line["timing_s/exchange"] > 0 for line in steps_of(runs["together"]))


def test_one_role_releases_before_the_other_acquires_and_a_refit_holds_only_weights(runs: dict[str, Config]) -> None:
    held = {"train": {"weights", "gradients", "optimizer"}, "generation": set()}  # generation is started when train is away
    lines = exchanges(runs["together"])
    held["train"] = set()
    held["generation"] = {"weights", "kv_cache"}
    for role, _, _, now in lines[1:]:  # the first line: train leaves before generation starts
        held[role] = set(now)
        alone = not held["train"] or not held["generation"]
        assert alone or held["train"] | held["generation"] == {"weights"}, lines


def test_order_of_a_step(runs: dict[str, Config]) -> None:
    """Between two steps: to train, to the refit, to generation. Weights are dropped, because the refit sends them."""
    order = [(role, what) for role, what, _, _ in exchanges(runs["together"])]
    step = [*TO_TRAIN, *TO_REFIT, *TO_GENERATE]
    places = [start for start in range(len(order)) if order[start : start + len(step)] == step]
    assert len(places) >= 5, order
    levels = [parts for role, what, parts, _ in exchanges(runs["together"]) if what == "sleep"]
    assert ["2"] in levels and ["1"] in levels, "kept for a checkpoint, dropped before a step"


@pytest.mark.slow
def test_a_stop_saves_the_tokens_of_running_requests(tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one_cluster.__wrapped__(cluster, monkeypatch)
    work, requested = Experience.work, list[Experience]()

    def stopping(experience: Experience) -> None:
        work(experience)
        if experience.buffer.version == 1 and not requested:
            requested.append(experience)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Experience, "work", stopping)
    config = configuration(tmp_path, "stopped", policy=COLOCATED)
    with pytest.raises(StopRequestedError):
        run_grpo(config)
    [checkpoint] = (tmp_path / "stopped" / "checkpoints").glob("step*")
    saved = read_trajectories(checkpoint)
    assert saved is not None
    episodes = [episode for group in saved.groups for episode in group.group.episodes]
    assert any(episode.tokens and not episode.finish_reason for episode in episodes), "half-made sequences"


def test_asynchronous_training_is_an_error(tmp_path: Path) -> None:
    config = configuration(tmp_path, "refused", policy=COLOCATED, grpo={"async_grpo": {"enabled": True}})
    with pytest.raises(ConfigError, match="take turns"):
        preflight(config)
