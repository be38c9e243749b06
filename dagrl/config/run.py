"""The configuration of a run: one YAML file, overridden by `a.b=c` arguments, validated before anything starts.

Keys and defaults follow NeMo-RL where it has them (`policy.*`, `grpo.*`, `loss_fn.*`, `checkpointing.*`). The resolved
configuration is saved with the run. Sections are by subject in `policy.py`, `megatron.py`, `generation.py`, `algorithm.py`
and `task.py`.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dagrl.config.algorithm import (
    AdvantageConfig,
    GrpoConfig,
    LossConfig,
    PpoConfig,
    PreferenceConfig,
    SftConfig,
    known_algorithm,
)
from dagrl.config.models import CriticConfig, FrozenModelConfig
from dagrl.config.policy import PolicyConfig
from dagrl.config.section import PathText, Section, Seed, derived
from dagrl.config.task import DataConfig, EnvironmentConfig, EvaluationConfig, RewardConfig
from dagrl.runtime.deadline import Deadline

TRAIN, GENERATION, CRITIC = "train", "generation", "critic"
"""The roles of every run that has them; `models` adds others."""


class RefitConfig(Section):
    """How weights are sent from train to generation workers."""

    verify: Literal["off", "checksum"] = "off"
    """`checksum`: compare checksums of the sent and the received weights after each refit."""


_SHIPPED = (
    *("demonstration_step", "train_step", "evaluate", "preference_step", "answer_sums", "reference_answer_sums"),
    *("logprobs", "reference_logprobs", "teacher_logprobs", "keep_columns", "critic_values", "critic_step"),
    *("logprob_inference_prep", "training_prep", "generate"),
)
PHASES = {name: f"dagrl.graphs.phases:{name}" for name in _SHIPPED} | {"refit": "dagrl.refit.connect:refit"}
"""The import paths of the phases that the loops replay, by name. Their docstrings say what they do."""


def _role_names(models: dict[str, FrozenModelConfig]) -> dict[str, FrozenModelConfig]:
    wrong = [name for name in models if not name.isidentifier() or name in (TRAIN, GENERATION, CRITIC)]
    if wrong:
        raise ValueError(f"names of roles, which {wrong[0]!r} cannot be: a Python name other than train, generation, critic")
    return models


def _known_phases(phases: dict[str, str]) -> dict[str, str]:
    unknown = [name for name in phases if name not in PHASES]
    if unknown:
        raise ValueError(
            f"names of phases, which {unknown[0]!r} is not: {', '.join(PHASES)}. A phase of your own for a column is "
            "named by its import path in the algorithm's `columns`"
        )
    return phases


class CheckpointConfig(Section):
    """Checkpoints."""

    enabled: bool = True
    """Save checkpoints."""

    save_period: PositiveInt = 10
    """Steps between checkpoints."""

    keep_top_k: PositiveInt | None = 3
    """Number of best checkpoints by `metric_name` to keep. If this and `keep_last_k` are null, all are kept."""

    keep_last_k: PositiveInt | None = None
    """Number of newest checkpoints to keep in addition. null: one."""

    metric_name: str | None = None
    """Metric of the saved step that `keep_top_k` compares, such as `validation/reward`. null: the newest are the best."""

    higher_is_better: bool = True
    """Whether a higher `metric_name` is better."""

    async_save: bool = False
    """Write checkpoints in the background while the run continues."""

    resume: bool = False
    """Resume from the newest checkpoint of this run, if there is one."""

    export_hf: bool = True
    """Write the final policy as Hugging Face safetensors."""


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = "dagrl"
    """Project of the run."""

    name: str | None = None
    """Name of the run. null: `name`."""


class LoggerConfig(Section):
    """Logs and metrics."""

    tensorboard_enabled: bool = True
    """Write metrics for TensorBoard."""

    wandb_enabled: bool = False
    """Send metrics to Weights & Biases."""

    wandb: WandbConfig = WandbConfig()

    rollouts_max_bytes: NonNegativeInt | None = 10 << 30
    """Largest size of `rollouts/`, which has every sample for `dagrl view`: trained on, validated and dropped. Above it the
    oldest steps are deleted. 0: none is kept. null: no limit."""

    trace_enabled: bool = True
    """Write `trace.json`, a timeline of the run for Perfetto."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged."""


class ClusterConfig(Section):
    """The Ray cluster. CPUs and GPUs apply to a cluster that dagrl starts, not to one at `address`."""

    address: str | None = None
    """Address of a running Ray cluster. null: start Ray on this machine."""

    num_cpus: PositiveInt | None = None
    """CPUs that Ray offers on this machine. null: all."""

    num_gpus: NonNegativeInt | None = None
    """GPUs that Ray offers on this machine. null: all."""

    gpus_per_worker: NonNegativeFloat | None = None
    """GPUs of each worker; a fraction lets workers share one. null: 1 if the machine has GPUs, else 0."""

    keep_imports_s: NonNegativeFloat = 0.0
    """Seconds for which a process that has imported torch, Megatron and vLLM stays after a run, for the next one of the same
    terminal, whose workers are forked from it. It has no GPU memory, and several hundred MB of the host's."""


class TimeoutConfig(Section):
    """Deadlines in seconds. Every wait of a run has one of these."""

    start_s: PositiveFloat = derived(180.0, "GPUs: 600; else 180")
    """Start the workers and load the model."""

    compile_s: PositiveFloat = 60.0
    """Prepare the workers for a graph, and again to compile it."""

    warmup_s: PositiveFloat = derived(180.0, "GPUs: 600; else 180")
    """One warm-up replay."""

    replay_s: PositiveFloat = derived(120.0, "GPUs: 600; else 120")
    """One replay, at most. A hang is noticed sooner, by the two keys below."""

    hang_factor: PositiveFloat = 10.0
    """A worker hangs if it runs a replay for this multiple of the longest replay of its phase so far, or does not answer for
    as long. The first replay of a bucket may take `replay_s`."""

    hang_floor_s: PositiveFloat = 10.0
    """The least time after which a worker hangs."""

    grace_s: PositiveFloat = 30.0
    """After a worker raised in a replay: time for the others to end it before they are killed. About as long as a
    restart."""

    collective_s: PositiveFloat = derived(60.0, "GPUs: 300; else 60")
    """One collective operation between workers."""

    checkpoint_s: PositiveFloat = derived(120.0, "GPUs: 600; else 120")
    """Save or load a checkpoint."""

    teardown_s: PositiveFloat = 8.0
    """Tear down the graphs; then workers are killed."""

    @property
    def replay(self) -> Deadline:
        """`replay_s` and its key. Also the deadline of work between two replays."""
        return Deadline(self.replay_s, "timeouts.replay_s")

    @property
    def checkpoint(self) -> Deadline:
        """Twice `checkpoint_s`, and its key: workers that wait for others' files give up first, and say so."""
        return Deadline(self.checkpoint_s, "timeouts.checkpoint_s").times(2)


class ExecutorConfig(Section):
    """How phases are executed."""

    engine: Literal["dagrl", "ray"] = "dagrl"
    """What runs compiled graphs. `dagrl`: our own loops and edges, on any Ray. `ray`: Ray's Compiled Graphs, with the same
    results and more time per replay. Phases with edges between accelerators always use `ray`."""


NAME_BYTES = 240
"""Longest name of a run: the 255 of a file system, less what names such as `.<name>.lock` and `<name>.1` have more."""


def _directory_name(name: str) -> str:
    if "\0" in name or name == ".." or not name or Path(name).name != name:
        raise ValueError("a plain directory name, without slashes")
    if len(os.fsencode(name)) > NAME_BYTES:
        raise ValueError(f"a name of at most {NAME_BYTES} bytes")
    return name


class Config(Section):
    """The configuration of a run."""

    name: Annotated[str, AfterValidator(_directory_name)]
    """Name of the run and of its directory in `output_dir`."""

    algorithm: Annotated[str, AfterValidator(known_algorithm)]
    """The training algorithm: `sft`, `grpo`, `ppo`, `dpo`, `reward_model`, or the import path `module:Class` of your own
    (`dagrl.rl.algorithm`)."""

    seed: Seed = 0
    """Seed of sampling, and of everything without a seed of its own."""

    output_dir: PathText = "runs"
    """Parent directory of the run's directory."""

    executor: Literal["compiled", "eager"] = "compiled"
    """`compiled`: static graphs, run by `executor_cfg.engine`. `eager`: plain actor calls, with the same results."""

    fallback: Literal["eager", "error"] = "eager"
    """What to do if a phase cannot be compiled: run it eagerly, or fail."""

    on_failure: Literal["stop", "restart"] = "restart"
    """After a worker raised, died or hung: end the run, or go on. `restart` replaces a generation engine that died on a
    living host while training goes on. After any other failure the run restarts from the newest checkpoint, if
    `checkpointing.enabled`."""

    max_restarts: PositiveInt = 3
    """Maximum number of restarts and replaced engines together."""

    executor_cfg: ExecutorConfig = ExecutorConfig()
    policy: PolicyConfig
    loss_fn: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    grpo: GrpoConfig = GrpoConfig()
    ppo: PpoConfig = PpoConfig()
    critic: CriticConfig = CriticConfig()

    models: Annotated[dict[str, FrozenModelConfig], AfterValidator(_role_names)] = Field(default_factory=dict)
    """Frozen models by role: the name of the `Shard` of the phases that run them, for columns of the algorithm. With the
    shipped algorithms `teacher` is the reference policy, in place of one on the train workers."""

    sft: SftConfig = SftConfig()
    preference: PreferenceConfig = PreferenceConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    refit: RefitConfig = RefitConfig()

    phases: Annotated[dict[str, str], AfterValidator(_known_phases)] = Field(default_factory=dict)
    """Import paths of your own phases, each by the name of the one that it replaces, such as `train_step` or `refit`."""

    checkpointing: CheckpointConfig = CheckpointConfig()
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig = ClusterConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
