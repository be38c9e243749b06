"""Checks that a run can go on from its newest checkpoint, before anything starts: same model, same data, same stages.

Another parallel layout is no difference.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dagrl.config import Config, Json
from dagrl.config.plan import RunPlan
from dagrl.config.roles import CRITIC, TRAIN, role_config
from dagrl.data import open_sampler
from dagrl.data.tokenization import Demonstration, Preference, Prompt, Row
from dagrl.errors import CheckpointError, ConfigError
from dagrl.run.checkpoint_store import Checkpoint
from dagrl.run.model import role_description

SAVED_ROLES = (TRAIN, CRITIC)  # roles whose workers have a state that checkpoints hold
REFERENCE = "reference_policy"  # counter of a checkpoint: whether the train workers saved a reference policy


def check_model_of(resumed: Checkpoint, config: Config, hf_config: Mapping[str, Json], workers: Mapping[str, type]) -> None:
    """Raises CheckpointError if workers of these classes cannot load the checkpoint (`CheckpointChecker`)."""
    for role in SAVED_ROLES:
        worker = workers.get(role)
        if worker is None:
            continue
        directory = resumed.directory / role
        if not directory.is_dir():
            raise CheckpointError(
                f"{resumed.directory} has no state of the {role} workers: it was saved by a run without them. Start a new "
                "run, or resume with the algorithm that saved it"
            )
        if hasattr(worker, "check_checkpoint"):
            described = role_description(config, role, hf_config)
            worker.check_checkpoint(role_config(config, role), described, str(directory))


def check_state_of(
    resumed: Checkpoint,
    config: Config,
    plan: RunPlan,
    demonstrations: Sequence[Demonstration],
    prompts: Sequence[Prompt],
    preferences: Sequence[Preference],
) -> None:
    """Raises a UserError if the run, with these examples, cannot go on from the driver's state in the checkpoint."""
    check_reference(config, plan, resumed)
    check_stage(config, plan, resumed)
    _check_position(resumed, "sft_sampler", demonstrations, config)
    _check_position(resumed, "grpo_sampler", prompts, config)
    _check_position(resumed, "preference_sampler", preferences, config)


class NoStepsLeftError(Exception):
    """A run that resumes has taken all of its steps and written its policy before. Not a failure of the run."""


SECTIONS = {"samples": ("sft", "grpo"), "demonstrations": ("sft",), "preferences": ("preference",)}
"""The sections that say how many steps a run has, by what its algorithm learns from."""


def check_steps_left(config: Config, plan: RunPlan, resumed: Checkpoint, final_model: Path) -> None:
    """Raises NoStepsLeftError if neither a step nor the final model is left to make."""
    steps = {f"{name}.max_num_steps": getattr(config, name).max_num_steps for name in SECTIONS[plan.learns_from]}
    written = final_model / "config.json"  # older than the checkpoint if a run was killed before it wrote the model again
    missing = not written.exists() or written.stat().st_mtime < resumed.directory.stat().st_mtime
    if resumed.state.step >= sum(steps.values()) and not (config.checkpointing.export_hf and missing):
        ends = ", ".join(f"{key}={count}" for key, count in steps.items())
        raise NoStepsLeftError(f"no step is left ({ends}): {resumed.directory} is of step {resumed.state.step}")


def _check_position(resumed: Checkpoint, counter: str, rows: Sequence[Row], config: Config) -> None:
    """Raises CheckpointError if a position in the data was saved that is not one in `rows`."""
    position = resumed.state.counters.get(counter)
    if position is None or not rows:
        return
    try:
        open_sampler(rows, config.data).restore(position)
    except CheckpointError as error:
        raise CheckpointError(f"{resumed.directory}: {error}") from error


def check_reference(config: Config, plan: RunPlan, resumed: Checkpoint) -> None:
    """Raises ConfigError if the run needs the first policy as a reference and the checkpoint does not have it."""
    if plan.reference == TRAIN and resumed.state.counters.get(REFERENCE) is False:
        raise ConfigError(
            f"algorithm {config.algorithm} needs a reference policy (loss_fn.reference_policy_kl_penalty is "
            f"{config.loss_fn.reference_policy_kl_penalty:g}), but {resumed.directory} has none, because it was not needed "
            "when it was saved; resume without it, or start a new run, whose first policy is the reference"
        )


def check_stage(config: Config, plan: RunPlan, resumed: Checkpoint) -> None:
    """Raises ConfigError if SFT steps would follow those on samples: they would start the data and the optimizer again."""
    steps, step = config.sft.max_num_steps, resumed.state.step
    if "grpo_sampler" in resumed.state.counters and plan.generates and step < steps:
        raise ConfigError(
            f"sft.max_num_steps is {steps}, but {resumed.directory} is of step {step}, after {config.algorithm} had begun; "
            "set it to what it was when the run began"
        )
