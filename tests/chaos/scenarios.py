"""The runs that faults are tried on: small jobs on the CPU, each compared with an undisturbed run of its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.integration.main_job import GRPO, SFT

COMMON = (
    *("on_failure=restart", "max_restarts=1000"),
    "timeouts={start_s: 120, compile_s: 60, warmup_s: 60, replay_s: 20, grace_s: 10, collective_s: 20, checkpoint_s: 20}",
    *("checkpointing.keep_last_k=2", "checkpointing.save_period=5"),
    *("logger.tensorboard_enabled=false", "logger.trace_enabled=false"),
)
"""Deadlines are short, so that what hangs is found in seconds, and long enough for a busy machine."""

GROUPS = (
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "grpo.max_val_samples=16"),
    *("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8"),
    *("policy.generation.vllm_cfg.max_num_seqs=16", "policy.optimizer.lr=3e-3"),
    "sft.max_num_steps=0",
)
SEVENS = "reward.function=tests.chaos.task:sevens"
IN_FLIGHT = (
    *("grpo.async_grpo.enabled=true", "grpo.async_grpo.in_flight_weight_updates=true"),
    "grpo.async_grpo.max_trajectory_age_steps=2",
    "loss_fn.use_importance_sampling_correction=true",
)


@dataclass(frozen=True)
class Scenario:
    """A configuration and its overrides.

    `exact`: a run that was disturbed ends with the same weights and metrics, bit for bit. Otherwise every step is there
    once, with finite numbers. `reached`: the places that faults can be aimed at, each with a pattern of command lines of its
    processes.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    steps: int
    exact: bool
    reached: Mapping[str, str] = field(default_factory=dict)
    hosts: int = 1

    def arguments(self) -> tuple[str, ...]:
        """Returns the overrides, with those of all scenarios."""
        return (*COMMON, *self.overrides)


RAY = {"raylet": "/raylet/raylet", "GCS": "gcs_server", "runtime-env agent": "runtime_env.agent"}
WORKERS = {"train worker": "ray::Megatron", "generation worker": "ray::Vllm"}
TRAIN = {"train worker": WORKERS["train worker"], **RAY}
BOTH = {**WORKERS, **RAY, "reward": "dagrl.rl.functions.child"}
SFT_STEPS, GRPO_STEPS = 600, 150

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "sft",
            SFT,
            (
                *(f"sft.max_num_steps={SFT_STEPS}", "sft.val_period=100", "sft.max_val_samples=16"),
                *("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8"),
            ),
            SFT_STEPS,
            exact=True,
            reached=TRAIN,
        ),
        Scenario(
            "grpo",
            GRPO,
            (*GROUPS, SEVENS, f"grpo.max_num_steps={GRPO_STEPS}", "grpo.val_period=50"),
            GRPO_STEPS,
            exact=True,
            reached=BOTH,
        ),
        Scenario(
            "async",
            GRPO,
            (*GROUPS, *IN_FLIGHT, SEVENS, f"grpo.max_num_steps={GRPO_STEPS}", "grpo.val_period=50"),
            GRPO_STEPS,
            exact=False,
            reached=BOTH,
        ),
        Scenario(
            "turns",
            GRPO,
            (
                *GROUPS,
                f"grpo.max_num_steps={GRPO_STEPS}",
                "grpo.val_period=0",
                "policy.max_total_sequence_length=32",
                "environment={function: 'tests.chaos.task:Again', max_turns: 3}",
                "reward.function=null",
            ),
            GRPO_STEPS,
            exact=True,
            reached={**BOTH, "environment": "dagrl.rl.functions.child"},
        ),
        Scenario(
            "two hosts",
            SFT,
            (
                *(f"sft.max_num_steps={SFT_STEPS}", "sft.val_period=0"),
                *("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8"),
                "cluster.gpus_per_worker=1",
            ),
            SFT_STEPS,
            exact=True,
            reached=TRAIN,
            hosts=2,
        ),
    )
}
