"""Colocated workers: the order of their memory exchanges, and losses equal to those of separate devices."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dagrl.config import Config
from dagrl.errors import ConfigError
from dagrl.run.preflight import preflight
from dagrl.run.train import train
from tests.integration.main_job import steps_of
from tests.integration.test_async_grpo import configuration
from tests.integration.test_ppo import CRITIC, TEACHER, ppo, write_teacher
from tests.integration.unigram_workers import EXCHANGES

STATES = ("train", "critic", "teacher")
COLOCATED = {"generation": {"colocated": {"enabled": True, "exchange": "always"}}}


def exchanges(config: Config) -> list[tuple[str, str, list[str], list[str]]]:
    lines = (Path(config.output_dir) / config.name / EXCHANGES).read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, one_cluster: None) -> Callable[[str], Config]:
    """Runs of PPO, with a critic and a teacher, on separate devices and colocated; once each."""
    output = tmp_path_factory.mktemp("colocated")
    write_teacher(output / "teacher")
    teacher = {**TEACHER, "model_name": str(output / "teacher"), "megatron_cfg": {"data_parallel_size": 1}}
    sections: dict[str, Any] = {"critic": CRITIC, "models": {"teacher": teacher}}
    sections["loss_fn"] = {"reference_policy_kl_penalty": 0.1}
    shared = {"critic": {**CRITIC, "colocated": True}, "models": {"teacher": {**teacher, "colocated": True}}}
    configs = {
        "apart": ppo(output, "apart", **sections),
        "together": ppo(output, "together", **sections | shared, policy=COLOCATED),
    }

    @cache
    def trained(name: str) -> Config:
        train(configs[name])
        return configs[name]

    return trained


def losses(config: Config) -> list[list[Any]]:
    names = ("step", "loss", "policy/kl", "reward/mean", "completion_tokens", "validation/reward")
    names += ("critic/loss", "critic/explained_variance")
    return [[line.get(name) for name in names] for line in steps_of(config)]


@pytest.mark.slow
def test_losses_equal_those_on_separate_devices(run: Callable[[str], Config]) -> None:
    """Each worker also checks that it holds what it computes with."""
    apart, together = run("apart"), run("together")
    assert losses(together) == losses(apart) and len(losses(apart)) == 5
    assert all(line["timing_s/exchange"] > 0 for line in steps_of(together))


def test_one_role_releases_before_another_acquires_and_a_refit_holds_only_weights(run: Callable[[str], Config]) -> None:
    held: dict[str, set[str]] = {"generation": {"weights", "kv_cache"}}
    lines = exchanges(run("together"))
    assert {(role, what, *now) for role, what, _, now in lines[:3]} == {(role, "offload") for role in STATES}
    for role, _, _, now in lines[3:]:  # before these, each state leaves before the next group starts
        held[role] = set(now)
        assert sum(map(bool, held.values())) <= 1 or set.union(*held.values()) == {"weights"}, lines


def test_order_of_a_step(run: Callable[[str], Config]) -> None:
    """From generation to the teacher, to training, to the critic, to training, to the refit, to generation. Weights are
    dropped, because the refit sends them."""
    order = [(role, what) for role, what, _, _ in exchanges(run("together"))]
    states = [turn for role in ("teacher", "train", "critic", "train") for turn in ((role, "reload"), (role, "offload"))]
    step = [("generation", "sleep"), *states, ("generation", "wake_up"), ("train", "offload"), ("generation", "wake_up")]
    places = [start for start in range(len(order)) if order[start : start + len(step)] == step]
    assert len(places) >= 5, order
    levels = [parts for role, what, parts, _ in exchanges(run("together")) if what == "sleep"]
    assert ["2"] in levels and ["1"] in levels, "kept for a checkpoint, dropped before a step"


def test_asynchronous_training_is_an_error(tmp_path: Path) -> None:
    config = configuration(tmp_path, "refused", policy=COLOCATED, grpo={"async_grpo": {"enabled": True}})
    with pytest.raises(ConfigError, match="take turns"):
        preflight(config)
