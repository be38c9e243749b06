"""Algorithms of the user's own: which phases and workers they need, and which are rejected."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dagrl
from dagrl import Algorithm, TokenBatch
from dagrl.config import ALGORITHMS, Config
from dagrl.config.plan import RunPlan
from dagrl.config.settings import algorithm_name
from dagrl.errors import ConfigError
from dagrl.examples.own_algorithm import WEIGHT, KlInReward
from dagrl.examples.two_teachers import TwoTeachers
from dagrl.rl.algorithm import algorithm_for, algorithm_of
from dagrl.rl.losses import batch_loss
from dagrl.rl.trial import try_algorithm
from dagrl.run.plans import ColumnPhases, column_phases
from tests.unit.rl.test_losses import make_batch, sequence_mean, token_mean

REPOSITORY = Path(dagrl.__file__).parents[1]


def config_of(algorithm: str | type, **sections: Any) -> Config:
    name = algorithm if isinstance(algorithm, str) else f"{algorithm.__module__}:{algorithm.__name__}"
    policy = {"generation": {}, "megatron_cfg": {"data_parallel_size": 2}}
    return Config.model_validate({"name": "t", "algorithm": name, "data": {}, "policy": policy, **sections})


class Likelihood(Algorithm):
    columns = {}

    def loss(self, batch: TokenBatch) -> Tensor:
        return -batch.logprobs


class Weighted(Likelihood):
    """Demonstrations, each sequence with the same weight."""

    learns_from = "demonstrations"
    average = "sequences"


class WithoutItsColumn(Likelihood):
    def loss(self, batch: TokenBatch) -> Tensor:
        return -batch.advantages * torch.exp(batch.log_ratio)


class WithoutAReference(Algorithm):
    def loss(self, batch: TokenBatch) -> Tensor:
        return batch.logprobs - batch.reference_logprobs


class WithAnUnknownColumn(Likelihood):
    columns = {"prev_logprobs": "logprobs", "entropies": "entropies"}


class WithColumnsAlone(Algorithm):
    columns = ("prev_logprobs",)  # type: ignore[assignment]


class OfAnotherShape(Likelihood):
    def loss(self, batch: TokenBatch) -> Tensor:
        return -batch.logprobs.sum(dim=1)


class NotFinite(Likelihood):
    def loss(self, batch: TokenBatch) -> Tensor:
        return torch.log(batch.logprobs)  # of negative numbers


class WithBadAdvantages(Likelihood):
    def advantages(self, rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
        return rewards.mean(axis=1)


class WithOneTable(Likelihood):
    critic = True

    def token_advantages(self, rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:  # type: ignore[override]
        return rewards - values


class Unbuildable(Likelihood):
    def __init__(self, config: Config) -> None:
        raise KeyError("beta")


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (WithoutItsColumn, "reads the column 'prev_logprobs', but .* name it in the algorithm's `columns`"),
        (
            WithoutAReference,
            "reads the column 'reference_logprobs', but the batch has only prev_logprobs, generation_logprobs",
        ),
        (WithColumnsAlone, r"the `columns` of .*WithColumnsAlone are \('prev_logprobs',\); expected: a dictionary"),
        (OfAnotherShape, r"OfAnotherShape returned \[2\] for 'loss'; expected: .* of the shape of the tokens, \[2, 5\]"),
        (NotFinite, "NotFinite gives costs or gradients that are not finite"),
        (WithBadAdvantages, r"WithBadAdvantages returned advantages of shape \[2\].*expected: a finite advantage for each"),
        (WithOneTable, r"token_advantages of .*WithOneTable returned .* \[\[5\], \[5\]\].*expected: finite advantages"),
        (Unbuildable, "Unbuildable raised KeyError: 'beta'"),
        (Algorithm, "raised NotImplementedError"),
        (Path, "pathlib:Path is not an algorithm; derive the class from dagrl.Algorithm"),
    ],
)
def test_algorithms_that_cannot_train_are_rejected(algorithm: type, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        try_algorithm(config_of(algorithm))


def phases_of(algorithm: str | type, **sections: Any) -> ColumnPhases:
    config = config_of(algorithm, **sections)
    try_algorithm(config)
    return column_phases(config, RunPlan.of(config))


def test_columns_decide_which_phases_run() -> None:
    config = config_of(KlInReward, loss_fn={"reference_policy_kl_penalty": 0.0})
    try_algorithm(config)
    plan = RunPlan.of(config)
    assert column_phases(config, plan).train == ("logprobs", "reference_logprobs") and plan.reference == "train"
    assert phases_of("grpo", loss_fn={"reference_policy_kl_penalty": 0.0}).train == ("logprobs",)
    forced = {"reference_policy_kl_penalty": 0.0, "force_on_policy_ratio": True}
    taught, models = {"teacher": {"model_name": "m"}}, {"first": {"model_name": "a"}, "second": {"model_name": "b"}}
    assert phases_of("grpo", models=taught) == ColumnPhases(("logprobs",), {"teacher_logprobs": ("reference_logprobs",)})
    own = "dagrl.examples.two_teachers:"
    apart = {f"{own}first_logprobs": ("first",), f"{own}second_logprobs": ("second",)}
    assert phases_of(TwoTeachers, models=models) == ColumnPhases(("logprobs",), apart)
    with pytest.raises(ConfigError, match=r"'entropies' is no phase; expected: .*logprobs, .*, or the import path"):
        phases_of(WithAnUnknownColumn)
    with pytest.raises(ConfigError, match=r"column 'second' .* on 'second'; expected: one role.*Add models.second.model_n"):
        phases_of(TwoTeachers, models={"first": {"model_name": "a"}})
    assert phases_of("grpo", loss_fn=forced).train == ()


def test_learns_from_decides_which_workers_run() -> None:
    layouts = [list(RunPlan.of(config_of(algorithm)).layouts) for algorithm in (Weighted, "sft", KlInReward)]
    assert layouts == [["train"], ["train"], ["train", "generation"]]
    assert [algorithm_name(config_of(algorithm)) for algorithm in ("grpo", KlInReward)] == ["grpo", "KlInReward"]


def test_an_example_equals_its_formula() -> None:
    logprobs, data, denominators = make_batch()
    mask = data["loss_mask"]
    data = {name: torch.where(mask > 0, values, 0.0) for name, values in data.items()}
    output = batch_loss(algorithm_of(config_of(KlInReward)), logprobs, data, denominators)
    distance = data["prev_logprobs"] - data["reference_logprobs"]
    cost = -(data["advantages"] - WEIGHT * distance) * (logprobs - data["prev_logprobs"]).exp()
    torch.testing.assert_close(output.loss, sequence_mean(cost, mask))
    torch.testing.assert_close(output.sums["own/distance"], token_mean(distance, mask))


def test_demonstrations_are_learned_by_the_algorithm_or_by_sft() -> None:
    assert type(algorithm_for("likelihood", config_of(Weighted))) is Weighted
    assert algorithm_for("likelihood", config_of("grpo")).learns_from == "demonstrations"
    assert type(algorithm_for("policy", config_of(KlInReward))) is KlInReward
    assert not RunPlan.of(config_of(Weighted)).generates
    with pytest.raises(ConfigError, match="loss 'grpo' is unknown; choose one of likelihood, policy"):
        algorithm_for("grpo", config_of("grpo"))


@pytest.mark.parametrize("room", ["workers", "graphs", "dagrl/runtime"])
def test_workers_phases_and_the_runtime_name_no_algorithm(room: str) -> None:
    names = re.compile(rf"(?<![a-z])({'|'.join(ALGORITHMS)})(?![a-z])", re.IGNORECASE)
    files = list((REPOSITORY / room).rglob("*.py"))
    assert files
    actual = [f"{file}: {line}" for file in files for line in file.read_text().splitlines() if names.search(line)]
    assert not actual
