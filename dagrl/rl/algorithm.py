"""Algorithms. Choose one by `algorithm`, or write your own in one file.

    class Centered(Algorithm):
        columns = {"prev_logprobs": "logprobs"}  # computed by this phase before a step

        def advantages(self, rewards, valid):  # [prompts, completions]
            return rewards - rewards.mean(axis=1, keepdims=True)

        def loss(self, batch):  # tensors [b, t]
            return -batch.advantages * torch.exp(batch.log_ratio)

`algorithm: my_file:Centered` trains with it, packed, in every layout, synchronously or not: none of these belongs to an
algorithm. `dagrl.rl.algorithms` has the shipped ones; `dagrl.rl.losses` averages the costs that `loss` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt

from dagrl.config import ALGORITHMS, Config
from dagrl.config.plan import LearnsFrom, RunPlan, load_algorithm
from dagrl.errors import ConfigError
from dagrl.imports import load_class, running
from dagrl.rl.advantages import Floats, checked_advantages, checked_rewards, configured_advantages

if TYPE_CHECKING:
    from dagrl.rl.token_losses import TokenBatch, TokenResult

KEY = "algorithm"

LIKELIHOOD, POLICY, VALUE = "likelihood", "policy", "value"
LossName = Literal["likelihood", "policy", "value"]
"""The kinds of loss that a phase names: of demonstrations, of the run's algorithm, and of a critic's values."""

_SHARED = {LIKELIHOOD: ALGORITHMS["sft"], VALUE: "dagrl.rl.algorithms:Values"}
"""Import paths of the algorithms for kinds of loss that the run's algorithm does not learn."""


class Algorithm:
    """A training method. Derive from it, or from a shipped one.

    Workers and the driver make instances of their own when they need one, so they should be cheap and keep no state.
    """

    learns_from: ClassVar[LearnsFrom] = "samples"
    """`samples`: completions that the policy generates and a reward function scores. `demonstrations`: the data.
    `preferences`: pairs of answers; derive from `dagrl.PreferenceAlgorithm`."""

    critic: ClassVar[bool] = False
    """Whether a critic (`critic`) learns next to the policy. `token_advantages` then gets its values."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def columns(self) -> Mapping[str, str]:
        """Columns that are computed for a batch of samples before its optimizer step, each with its phase. Override it, also
        by a class attribute.

        A phase is one of dagrl's (`logprobs` computes `prev_logprobs` and `entropy` of the policy, `reference_logprobs` and
        `teacher_logprobs` compute `reference_logprobs`) or the import path of your own. It runs on the train workers, which
        keep its columns, or on those of a model in `models`, from which it returns them. Batches of samples also have
        `advantages` and `generation_logprobs`.
        """
        return {"prev_logprobs": "logprobs"}

    @property
    def average(self) -> Literal["tokens", "sequences", "sums"]:
        """How costs become the loss of the global batch. Override it, also by a class attribute.

        `tokens`: their mean. `sequences`: the mean over each sequence's tokens, then over sequences. `sums`: the sum over
        each sequence's tokens, then the mean over sequences.
        """
        return "tokens"

    def advantages(self, rewards: Floats, valid: npt.NDArray[np.bool_]) -> npt.ArrayLike:
        """Returns the advantage of each completion, from rewards and validity: arrays [prompts, completions].

        By default as `advantage.name` says. Gets all groups of a batch.
        """
        return configured_advantages(self.config, rewards, valid)

    def token_advantages(self, rewards: Floats, values: Floats, mask: Floats) -> tuple[npt.ArrayLike, npt.ArrayLike]:
        """Returns the advantage of each token, and the return that the critic learns for it. Only called with a critic.

        Arrays [rows, tokens]. `rewards`: what `advantages` returns, at each row's last token; `values` of the states before
        tokens; `mask`: 1 on tokens of the policy.
        """
        raise NotImplementedError

    def loss(self, batch: TokenBatch) -> TokenResult:
        """Returns the cost of each token [b, t], and optionally further values [b, t] whose means become metrics."""
        raise NotImplementedError


def algorithm_of(config: Config) -> Algorithm:
    """Returns the run's algorithm, a new instance. Raises ConfigError if `algorithm` names none."""
    return cast(Algorithm, load_algorithm(config))


def planned_algorithm(plan: RunPlan) -> Algorithm:
    """Returns the algorithm of a run."""
    return cast(Algorithm, plan.algorithm)


def algorithm_for(loss: str, config: Config) -> Algorithm:
    """Returns the algorithm behind the `loss` that a phase names.

    Demonstrations are learned by the run's algorithm if it learns from them, or else by `sft`.
    """
    own = algorithm_of(config)
    if loss == POLICY or (loss == LIKELIHOOD and own.learns_from == "demonstrations"):
        return own
    if loss not in _SHARED:
        raise ConfigError(f"loss {loss!r} is unknown; choose one of {LIKELIHOOD}, {POLICY}, {VALUE}")
    return cast(Algorithm, load_class(_SHARED[loss], KEY)(config))


def advantages_of(algorithm: Algorithm, rewards: npt.ArrayLike, valid: npt.ArrayLike) -> Floats:
    """Returns the algorithm's advantages: `[prompts, completions]` float64, 0 where not `valid`.

    Raises ConfigError if a user's method fails, or returns another shape or values that are not finite.
    """
    table, mask = checked_rewards(rewards, 1 if algorithm.critic else 2), np.asarray(valid, np.bool_)
    with running(algorithm.config.algorithm, KEY):
        if type(algorithm).advantages is Algorithm.advantages:
            return configured_advantages(algorithm.config, table, mask)
        advantages = algorithm.advantages(np.where(mask, table, 0.0), mask)
    return checked_advantages(advantages, mask, f"{KEY}: {algorithm.config.algorithm}")


def token_advantages_of(
    algorithm: Algorithm, rewards: Floats, values: npt.NDArray[Any], mask: npt.NDArray[Any]
) -> tuple[Floats, Floats]:
    """Returns the algorithm's advantages and returns [rows, tokens], 0 outside the mask.

    Raises ConfigError if a user's method fails, or returns other shapes or values that are not finite.
    """
    name = algorithm.config.algorithm
    with running(name, KEY):
        result = algorithm.token_advantages(rewards, values.astype(np.float64), mask.astype(np.float64))
        tables = [np.asarray(table, np.float64) for table in result]
    if [table.shape for table in tables] != [mask.shape] * 2 or not all(np.isfinite(table).all() for table in tables):
        shapes, finite = [list(table.shape) for table in tables], [bool(np.isfinite(table).all()) for table in tables]
        raise ConfigError(
            f"{KEY}: token_advantages of {name} returned tables of shapes {shapes}, finite: {finite}; expected: finite "
            f"advantages and returns, each {list(mask.shape)}"
        )
    advantages, returns = (np.where(mask > 0, table, 0.0) for table in tables)
    return advantages, returns


def columns_by_phase(algorithm: Algorithm) -> dict[str, tuple[str, ...]]:
    """Returns the phases of the algorithm's columns, each with the columns that it computes."""
    phases = dict.fromkeys(algorithm.columns.values())
    return {phase: tuple(name for name, source in algorithm.columns.items() if source == phase) for phase in phases}
