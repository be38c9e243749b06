"""How the policy learns: the algorithm, the loss, advantages, GRPO and SFT."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from dagrl.config.section import Json, Section, derived

ALGORITHMS: Mapping[str, str] = MappingProxyType(
    {
        "sft": "dagrl.rl.algorithms:Sft",
        "grpo": "dagrl.rl.algorithms:Grpo",
        "ppo": "dagrl.rl.algorithms:Ppo",
        "dpo": "dagrl.rl.algorithms:Dpo",
        "reward_model": "dagrl.rl.algorithms:RewardModel",
    }
)
"""The import paths of the algorithms that are shipped, by name."""


def known_algorithm(name: str) -> str:
    """Returns `name`. Raises ValueError if it is neither a shipped algorithm's nor an import path."""
    if name not in ALGORITHMS and ":" not in name:
        raise ValueError(f"{', '.join(map(repr, ALGORITHMS))} or the import path 'module:Class' of your own")
    return name


class LossConfig(Section):
    """The policy loss of `grpo`, and of your own algorithm if it reads these keys. `dagrl.rl.algorithms`,
    `dagrl.rl.losses` and `dagrl.rl.token_losses` have the formulas and their sources."""

    name: str = "grpo"
    """What each token costs: `grpo` (PPO's clipped surrogate), `gspo`, `cispo`, `reinforce`, `distill` (reverse KL
    to the reference policy), or the import path `module:function` of your own (`dagrl.rl.token_losses`)."""

    args: dict[str, Json] = Field(default_factory=dict)
    """Keyword arguments of your own loss function, or settings of your own algorithm (`self.config.loss_fn.args`)."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL divergence from the reference policy. 0: no reference policy, unless `models.teacher` is
    set."""

    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence."""

    ratio_clip_min: NonNegativeFloat = 0.2
    """The probability ratio is clipped from below at `1 - ratio_clip_min`."""

    ratio_clip_max: NonNegativeFloat = 0.2
    """The probability ratio is clipped from above at `1 + ratio_clip_max`."""

    ratio_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip: a token with a negative advantage costs at most this multiple of it. null: no such bound; verl has 3."""

    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Clamps log-probability differences in the KL penalty. null: no clamp."""

    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Clamps the KL penalty of each token. null: no clamp."""

    token_level_loss: bool = True
    """Average over all tokens of the batch. false: over each sequence first, then over sequences."""

    sequence_length_divisor: PositiveFloat | None = None
    """Without `token_level_loss`: divides each sequence's sum by this constant instead of its length (Dr.GRPO), such as
    `policy.generation.max_new_tokens`. null: by its length."""

    force_on_policy_ratio: bool = derived(False, "true on GPUs if a batch has one optimizer step, else false")
    """Take the previous log-probabilities from the training forward pass instead of computing them beforehand. Requires one
    optimizer step per batch (`train_global_batch_size` = prompts x generations), for which both are equal."""

    use_importance_sampling_correction: bool = False
    """Weight each token by exp(previous - generation log-probability)."""

    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    """How importance weights are bounded. `tis`: clamp. `icepop`: drop tokens outside the bounds. `seq-mask-tis`: drop
    sequences whose geometric mean is outside."""

    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound of the importance weights. null: no bounds."""

    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """Lower bound of the importance weights, for all types but `tis`. null: 0."""

    @model_validator(mode="after")
    def _weights_are_bounded_from_above(self) -> Self:
        kind, bound = self.truncated_importance_sampling_type, self.truncated_importance_sampling_ratio
        if bound is None and (kind != "tis" or self.truncated_importance_sampling_ratio_min is not None):
            raise ValueError(
                "truncated_importance_sampling_type or _ratio_min is set without the upper bound, "
                "truncated_importance_sampling_ratio; set it (2 is usual), or leave all three out"
            )
        if bound is not None and not self.use_importance_sampling_correction:
            raise ValueError(
                "truncated_importance_sampling_ratio is set, but the correction that it bounds is off; set "
                "use_importance_sampling_correction=true, or leave the bound out"
            )
        return self


class AdvantageConfig(Section):
    """How advantages come from rewards (`dagrl.rl.advantages`)."""

    name: str = "group"
    """`group`: against the other completions of the prompt (GRPO; RLOO with `grpo.use_leave_one_out_baseline`). `batch`:
    that, whitened over the batch (REINFORCE++-baseline). Or the import path `module:function` of your own."""

    args: dict[str, Json] = Field(default_factory=dict)
    """Keyword arguments of your own function."""


class AsyncGrpoConfig(Section):
    """Asynchronous GRPO: generation runs ahead while earlier batches train."""

    enabled: bool = False
    """Generate and train at the same time."""

    max_trajectory_age_steps: NonNegativeInt = 1
    """Maximum number of policy versions between the start of a group and the step that trains on it."""

    in_flight_weight_updates: bool = False
    """Update weights between two quanta while requests run. false: running requests finish first."""

    recompute_kv_cache_after_weight_updates: bool = False
    """Recompute the KV cache of running requests after an update. false: they continue from the cache they have."""

    @property
    def max_age_steps(self) -> int:
        """The maximal age of a sample in steps. 0: generation and training take turns."""
        return self.max_trajectory_age_steps if self.enabled else 0

    @model_validator(mode="after")
    def _recomputes_what_runs(self) -> Self:
        if self.enabled and self.recompute_kv_cache_after_weight_updates and not self.in_flight_weight_updates:
            raise ValueError(
                "recompute_kv_cache_after_weight_updates is true, but no request runs during an update; set "
                "in_flight_weight_updates=true, or leave it out"
            )
        return self


class RewardShapingConfig(Section):
    """Soft penalty for overlong completions (DAPO, arXiv:2503.14476, equation 13)."""

    enabled: bool = False
    """Add the penalty to the reward."""

    max_response_length: PositiveInt | None = None
    """Length in tokens at which the penalty is full. null: `policy.generation.max_new_tokens`."""

    overlong_buffer_length: PositiveInt = 128
    """Tokens before `max_response_length` over which the penalty grows linearly from 0."""

    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Full penalty."""


class LoopConfig(Section):
    """The length of a loop and its validations."""

    max_num_epochs: PositiveInt | None = None
    """Passes over the examples; the loop ends at this or at `max_num_steps`, whichever is first. null: no limit."""

    val_period: NonNegativeInt = 20
    """Steps between validations. 0: only at the start and the end."""

    val_at_start: bool = True
    """Validate before the first step."""

    max_val_samples: PositiveInt = 256
    """Maximum number of samples, or pairs, per validation."""


class GrpoConfig(LoopConfig):
    """The GRPO loop."""

    num_prompts_per_step: PositiveInt = 32
    """Prompts per batch."""

    num_generations_per_prompt: PositiveInt = 16
    """Completions per prompt: the group over which advantages are computed. With a critic also 1."""

    max_num_steps: PositiveInt = derived(100, "`max_num_epochs` passes over the prompts, or one")
    """Number of GRPO steps."""

    max_num_epochs: PositiveInt | None = None
    """Passes over the prompts that are trained on; the run ends at this or at `max_num_steps`, whichever is first. The
    schedule and the last validation use the resulting number of steps; `use_dynamic_sampling` draws more prompts than it
    trains on. null: no limit."""

    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of their group; with a leave-one-out baseline of the other completions."""

    use_leave_one_out_baseline: bool = True
    """Baseline: the mean reward of the group's other completions. false: of the whole group."""

    use_dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and generate others in their place (DAPO)."""

    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Batches dropped for one step before the run fails."""

    overlong_filtering: bool = False
    """Exclude completions that were cut off by their length from the loss."""

    reward_shaping: RewardShapingConfig = RewardShapingConfig()

    async_grpo: AsyncGrpoConfig = AsyncGrpoConfig()

    val_period: NonNegativeInt = 10
    """Steps between validations. 0: only at the start and the end."""

    @model_validator(mode="after")
    def _groups_may_differ(self) -> Self:
        if self.num_generations_per_prompt == 1 and self.use_dynamic_sampling:
            raise ValueError(
                "num_generations_per_prompt is 1, but use_dynamic_sampling drops groups whose rewards are all equal; set it "
                "to false, or generate 2 or more"
            )
        return self


class PpoConfig(Section):
    """Proximal policy optimization with a critic: algorithm `ppo`. Batches and steps are those of `grpo`."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a reward, per token."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalized advantage estimation (arXiv:1506.02438). 1: returns less values; 0: one-step errors."""


class SftConfig(LoopConfig):
    """Learning from demonstrations: the whole run with algorithm `sft`, a warm start with `grpo`."""

    max_num_steps: NonNegativeInt = derived(
        100, "GRPO: 0 if `max_num_epochs` is not set; else `max_num_epochs` passes over the demonstrations, or one"
    )
    """Number of steps. 0, if the algorithm learns from samples: no SFT first."""

    lr: PositiveFloat | None = derived(None, "GRPO: 1e-5 if there are SFT steps and no rate is set")
    """Learning rate, constant over the SFT steps. null: `policy.optimizer.lr`, which follows
    `policy.scheduler` with algorithm `sft` and is constant with `grpo`."""


class PreferenceConfig(LoopConfig):
    """Learning from preferences: algorithms `dpo` and `reward_model`."""

    max_num_steps: PositiveInt = derived(100, "`max_num_epochs` passes over the pairs, or one")
    """Number of steps. Each takes `policy.train_global_batch_size` pairs."""

    beta: PositiveFloat = 0.1
    """DPO: factor of the log-ratio to the reference policy. Larger values keep the policy nearer to it."""
