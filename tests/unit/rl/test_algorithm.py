"""Algorithms and advantages, also of the user's own: phases that they need, closed forms, clipping, and what is rejected."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import dagrl
from dagrl import Algorithm, TokenBatch
from dagrl.config import ALGORITHMS, Config
from dagrl.config.plan import RunPlan
from dagrl.config.settings import algorithm_name
from dagrl.errors import ConfigError, DataError
from dagrl.examples.own_algorithm import WEIGHT, KlInReward
from dagrl.examples.two_teachers import TwoTeachers
from dagrl.rl import advantages as of
from dagrl.rl.advantages import advantages_and_returns, explained_variance, group_advantages, rewards_at_end, whitened
from dagrl.rl.algorithm import VALUE, advantages_of, algorithm_for, algorithm_of
from dagrl.rl.losses import Denominators, batch_loss
from dagrl.rl.trial import try_advantages, try_algorithm
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


def test_an_example_equals_its_formula() -> None:
    logprobs, data, denominators = make_batch()
    mask = data["loss_mask"]
    data = {name: torch.where(mask > 0, values, 0.0) for name, values in data.items()}
    output = batch_loss(algorithm_of(config_of(KlInReward)), logprobs, data, denominators)
    distance = data["prev_logprobs"] - data["reference_logprobs"]
    cost = -(data["advantages"] - WEIGHT * distance) * (logprobs - data["prev_logprobs"]).exp()
    torch.testing.assert_close(output.loss, sequence_mean(cost, mask))
    torch.testing.assert_close(output.sums["own/distance"], token_mean(distance, mask))


def test_learns_from_decides_which_workers_run_and_what_learns_demonstrations() -> None:
    layouts = [list(RunPlan.of(config_of(algorithm)).layouts) for algorithm in (Weighted, "sft", KlInReward)]
    assert layouts == [["train"], ["train"], ["train", "generation"]]
    assert [algorithm_name(config_of(algorithm)) for algorithm in ("grpo", KlInReward)] == ["grpo", "KlInReward"]
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


def test_rewards_without_advantages_are_an_error() -> None:
    broken = [[1.0, 0.0], [float("nan"), 0.0]]
    for rewards, message in (([[1.0], [0.0]], "num_generations_per_prompt"), (broken, "prompt 1, generation 0 is nan")):
        with pytest.raises(DataError, match=message):
            group_advantages(rewards, leave_one_out=True, normalize=False)


@given(st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=2, max_size=6), st.booleans(), st.booleans())
def test_invalid_generations_are_ignored(drawn: list[tuple[float, bool]], leave_one_out: bool, normalize: bool) -> None:
    rewards, valid = (np.array([column]) for column in zip(*drawn, strict=True))
    actual = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize, valid=valid)
    assert (actual[~valid] == 0.0).all()
    if valid.sum() < 2:
        assert (actual == 0.0).all() and of.zero_variance_groups(rewards, valid).all()
        return
    alone = group_advantages([rewards[valid]], leave_one_out=leave_one_out, normalize=normalize)
    np.testing.assert_allclose(actual[valid], alone[0], rtol=1e-9, atol=1e-12)
    assert of.zero_variance_groups(rewards, valid).tolist() == of.zero_variance_groups([rewards[valid]]).tolist()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_advantages_of_groups_are_those_of_a_loop(leave_one_out: bool, normalize: bool) -> None:
    """NeMo-RL's `calculate_baseline_and_std_per_prompt`: with `leave_one_out`, a sample's statistics are the others'."""
    rewards = np.random.default_rng(0).normal(size=(3, 6))
    before, expected = rewards.copy(), np.zeros_like(rewards)
    for row, column in np.ndindex(*rewards.shape):
        group = np.delete(rewards[row], column) if leave_one_out else rewards[row]
        expected[row, column] = (rewards[row, column] - group.mean()) / (group.std(ddof=1) + 1e-6 if normalize else 1)
    actual = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)
    np.testing.assert_allclose(actual, expected, rtol=1e-9)
    np.testing.assert_array_equal(rewards, before)
    equal = [[0.1] * 7, [0, 0, 0, 0, 0, 0, 1]]  # the mean of seven 0.1 is not 0.1 in floating point
    actual = group_advantages(equal, leave_one_out=leave_one_out, normalize=normalize)
    assert (actual[0] == 0.0).all() and actual[1, -1] > 0 > actual[1, 0]
    assert of.zero_variance_groups(equal).tolist() == [True, False]


@pytest.mark.parametrize(("others", "best"), [(0.0, 1.0), (88.8, 88.9), (95.3, 95.4)])
def test_equal_rewards_of_the_others_have_no_deviation(others: float, best: float) -> None:
    """NeMo-RL divides only where the deviation of the others is positive. Their mean may round."""
    actual = group_advantages([[others] * 4 + [best]], leave_one_out=True, normalize=True)
    assert actual[0, -1] == pytest.approx(best - others)
    rest = np.array([others] * 3 + [best])
    np.testing.assert_allclose(actual[0, :-1], (others - rest.mean()) / (rest.std(ddof=1) + 1e-6))


def test_advantages_of_the_batch_are_whitened_rewards() -> None:
    rewards, valid = np.array([[1.0, 0, 0], [5, 4, 9]]), np.array([[True] * 3, [True, True, False]])
    actual = of.batch_advantages(rewards, valid)
    inside = np.array([2 / 3, -1 / 3, -1 / 3, 0.5, -0.5])  # less the mean of the valid ones of each row
    np.testing.assert_allclose(actual[valid], inside / (inside.std(ddof=1) + 1e-6))
    assert actual[1, 2] == 0


def config_with(**keys: object) -> Config:
    return Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": {}, "advantage": keys})


def scaled(rewards: np.ndarray, valid: np.ndarray, *, factor: float = 1.0) -> np.ndarray:
    return rewards * factor


def of_another_shape(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    return rewards.sum(axis=1)


def test_a_users_function_sees_no_reward_of_an_invalid_completion() -> None:
    config = config_with(name=f"{__name__}:scaled", args={"factor": 2.0})
    try_advantages(algorithm_of(config))
    rewards, valid = [[1.0, 2.0], [3.0, 50.0]], [[True, True], [True, False]]
    actual = advantages_of(algorithm_of(config), rewards, valid)
    np.testing.assert_array_equal(actual, [[2.0, 4.0], [6.0, 0.0]])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"name": "grop"}, "expected: group, batch, or the import path"),
        ({"name": f"{__name__}:scaled", "args": {"factors": 2}}, "advantage.args: .*'factors'; .* takes rewards, valid, "),
        ({"name": f"{__name__}:of_another_shape"}, r"shape \[2\].*expected: a finite advantage for each generation"),
    ],
)
def test_invalid_advantage_functions_are_rejected(keys: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        try_advantages(algorithm_of(config_with(**keys)))


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2015, equation 16: the discounted sum of the errors, each written out."""
    following = [*values, 0.0][1:]
    errors = [reward + gamma * after - value for reward, after, value in zip(rewards, following, values, strict=True)]
    steps = range(len(errors))
    return [sum((gamma * lam) ** (later - now) * errors[later] for later in steps[now:]) for now in steps]


@given(seed=st.integers(0, 2**16), gamma=st.floats(0.5, 1.0), lam=st.floats(0.0, 1.0))
def test_advantages_are_the_discounted_sums_of_errors_over_the_policys_tokens(seed: int, gamma: float, lam: float) -> None:
    draw = np.random.default_rng(seed)
    mask = (draw.random((3, 9)) < 0.6).astype(np.float32)  # prompts, padding and an environment's tokens anywhere
    rewards, values = draw.normal(size=(2, 3, 9))
    advantages, returns = advantages_and_returns(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(3):
        inside = mask[row] > 0
        expected = by_definition(rewards[row][inside].tolist(), values[row][inside].tolist(), gamma, lam)
        np.testing.assert_allclose(advantages[row][inside], expected, atol=1e-12)
        np.testing.assert_allclose(returns[row][inside], expected + values[row][inside], atol=1e-12)
    assert not advantages[mask == 0].any() and not returns[mask == 0].any()


def test_a_reward_at_the_end_is_every_tokens_return() -> None:
    """With gamma and lambda 1 the advantage is the reward minus the value, whatever the critic says of later tokens."""
    mask = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    rewards = rewards_at_end([2.0, -1.0, 5.0], mask)
    assert rewards.tolist() == [[0, 0, 0, 0, 2, 0], [0, 0, 0, 0, 0, -1], [0] * 6]
    values = np.random.default_rng(0).normal(size=mask.shape)
    advantages, returns = advantages_and_returns(rewards, values, mask, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns, mask * np.array([[2.0], [-1.0], [5.0]]), atol=1e-12)
    np.testing.assert_allclose(advantages, mask * (returns - values), atol=1e-12)


def test_whitened_advantages_have_mean_zero_and_variance_one() -> None:
    mask = np.random.default_rng(1).random((4, 7)) < 0.5
    actual = whitened(np.random.default_rng(2).normal(3, 5, mask.shape), mask)
    assert actual[mask].mean() == pytest.approx(0, abs=1e-12)
    assert actual[mask].var(ddof=1) == pytest.approx(1, abs=1e-6)
    assert not actual[~mask].any()
    assert not whitened([[3.0, 4.0]], [[1, 0]]).any()


def test_the_variance_that_values_explain() -> None:
    returns, mask = np.array([[1.0, 2.0, 9.0]]), np.array([[1, 1, 0]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns, np.zeros((1, 3)), mask) == 0.0
    assert explained_variance(np.ones((1, 3)), returns, mask) == 0.0
    values, mask = np.random.default_rng(0).normal(size=(2, 30)), np.ones((2, 30))
    _, returns = advantages_and_returns(rewards_at_end([0.3, 0.3], mask), values, mask, gamma=1.0, lam=1.0)
    assert 0 < returns.var() < 1e-30 and explained_variance(returns, values, mask) == 0.0, "returns that are equal but round"


@pytest.mark.parametrize(
    ("clip", "errors", "gradients", "clipped"),
    [
        (0.5, [0.5, 1.8, 0.2], [0.0, 1.8, 0.2], 1 / 3),  # kept within 0.5 of 1, the values are 1.5, 1.5 and 1.2
        (None, [0.2, 1.8, 0.2], [-0.2, 1.8, 0.2], 0.0),
    ],
)
def test_value_loss(clip: float | None, errors: list[float], gradients: list[float], clipped: float) -> None:
    """Half the mean squared error. A value that moved too far towards its return has no gradient."""
    values = torch.tensor([[7.0, 1.8, 1.8, 1.2]], requires_grad=True)
    columns = {"loss_mask": [0.0, 1, 1, 1], "values": [9.0, 1, 1, 1], "returns": [float("nan"), 2, 0, 1]}
    data = {name: torch.tensor([column]) for name, column in columns.items()}
    config = config_with().with_keys({"algorithm": "ppo", "critic.value_clip": clip})
    output = batch_loss(algorithm_for(VALUE, config), values, data, Denominators(3, 1))
    (gradient,) = torch.autograd.grad(output.loss, values)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, *gradients]]) / 3)
    expected = {"loss": sum(error**2 for error in errors) / 6, "value_clip_ratio": clipped, "valid_tokens": 3}
    expected |= {"value_mean": (1.8 + 1.8 + 1.2) / 3, "value_error": (0.2 + 1.8 + 0.2) / 3}
    assert {name: value.item() for name, value in output.sums.items()} == pytest.approx(expected)
