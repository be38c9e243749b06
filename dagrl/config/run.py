"""The configuration of a run: one YAML file, overridden by `a.b=c` arguments, validated before anything starts.

Keys and defaults follow NeMo-RL where it has them (`policy.*`, `grpo.*`, `loss_fn.*`, `checkpointing.*`). The resolved
configuration is saved with the run. The longest section, `policy`, is in `dagrl.config.policy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dagrl.config.policy import PolicyConfig
from dagrl.config.section import Json, PathText, Section, Seed, derived
from dagrl.runtime.deadline import Deadline


class LossConfig(Section):
    """The policy loss. `dagrl.rl.losses` and `dagrl.rl.token_losses` have the formulas and their sources."""

    name: str = "grpo"
    """What each token costs: `grpo` (PPO's clipped surrogate), `gspo`, `cispo`, `reinforce`, `distill` (reverse KL
    to the reference policy), or the import path `module:function` of your own (`dagrl.rl.token_losses`)."""

    args: dict[str, Json] = Field(default_factory=dict)
    """Keyword arguments of your own loss function."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL divergence from the reference policy. 0: no reference policy, unless `policy.reference_model_name` is
    set."""

    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence."""

    ratio_clip_min: NonNegativeFloat = 0.2
    """The probability ratio is clipped from below at `1 - ratio_clip_min`."""

    ratio_clip_max: NonNegativeFloat = 0.2
    """The probability ratio is clipped from above at `1 + ratio_clip_max`."""

    ratio_clip_c: float | None = Field(default=None, gt=1)
    """Dual clip: a token with a negative advantage costs at most this multiple of it. null: no such bound; verl has 3."""

    log_ratio_clamp: PositiveFloat | None = 20.0
    """Clamps the logarithm of probability ratios, as verl does, so that one token cannot overflow. null: no clamp."""

    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Clamps log-probability differences in the KL penalty. null: no clamp."""

    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Clamps the KL penalty of each token. null: no clamp."""

    token_level_loss: bool = True
    """Average over all tokens of the batch. false: over each sequence first, then over sequences."""

    sequence_length_divisor: PositiveFloat | None = None
    """Without `token_level_loss`: divides each sequence's sum by this constant instead of its length (Dr.GRPO), such as
    `policy.generation.max_new_tokens`. null: by its length."""

    force_on_policy_ratio: bool = False
    """Take the previous log-probabilities from the training forward pass instead of computing them beforehand. Requires one
    optimizer step per batch (`train_global_batch_size` = prompts x generations), for which both are equal."""

    use_importance_sampling_correction: bool = False
    """Weight each token by exp(previous - generation log-probability)."""

    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis", "seq-product-mask-tis"] = "tis"
    """How importance weights are bounded. `tis`: clamp. `icepop`: drop tokens outside the bounds. `seq-mask-tis`: drop
    sequences whose geometric mean is outside. `seq-product-mask-tis`: drop sequences whose product is outside."""

    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound of the importance weights. null: no bounds."""

    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """Lower bound of the importance weights, for `icepop` and `seq-mask-tis`. null: 0."""


class AdvantageConfig(Section):
    """How advantages come from rewards (`dagrl.rl.advantages`)."""

    name: str = "group"
    """`group`: against the other completions of the prompt (GRPO; RLOO with `grpo.use_leave_one_out_baseline`). `batch`:
    whitened over the batch (REINFORCE++). Or the import path `module:function` of your own."""

    args: dict[str, Json] = Field(default_factory=dict)
    """Keyword arguments of your own function."""

    std: Literal["others", "group"] = "others"
    """With `grpo.normalize_rewards` and a leave-one-out baseline: divide by the standard deviation of the other completions,
    as NeMo-RL, or of the whole group, as TRL and verl."""

    std_epsilon: NonNegativeFloat = 1e-6
    """Added to the standard deviation, as in NeMo-RL and verl; TRL has 1e-4."""

    group_baseline: bool = True
    """With `batch`: subtract the mean of each prompt's completions first (REINFORCE++-baseline)."""


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

    on_checkpoint: Literal["save", "regenerate"] = "save"
    """What a resumed run does with groups that were not trained on. `save`: keep them. `regenerate`: start again from their
    prompts."""


class RefitConfig(Section):
    """How weights are sent from train to generation workers."""

    verify: Literal["off", "checksum", "bitwise"] = "off"
    """Check after each refit that the received weights equal the sent ones: by checksums, or by sending all bytes again."""

    bucket_bytes: PositiveInt | None = None
    """Bytes sent at once. null: 64 to 512 MB by the model's size; at most 256 MB if colocated, by the number of ranks."""

    kv_scale_margin: float = Field(default=1.0, ge=1)
    """Factor on the calibrated scales of an FP8 KV cache."""

    replicate_in_host: bool = True
    """Send each byte to a host once and copy it there to the other ranks that need it."""

    cuda_graph: bool | Literal["auto"] = "auto"
    """Replay a refit between GPUs as one CUDA graph. `auto`: measure both and keep the faster."""

    gpus_per_host: PositiveInt = 8
    """GPUs per host, with which `dagrl inspect` assigns ranks to hosts."""

    in_host_gb_per_s: PositiveFloat = 450.0
    """Speed of a link within a host, in GB/s per direction. Orders the messages of a refit."""

    between_hosts_gb_per_s: PositiveFloat = 50.0
    """Speed of a link between hosts, in GB/s per direction."""


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


class GrpoConfig(Section):
    """The GRPO loop."""

    num_prompts_per_step: PositiveInt = 32
    """Prompts per batch."""

    num_generations_per_prompt: PositiveInt = Field(default=16, ge=2)
    """Completions per prompt: the group over which advantages are computed."""

    max_num_steps: PositiveInt = derived(100, "`max_num_epochs` passes over the prompts, or one")
    """Number of GRPO steps."""

    max_num_epochs: PositiveInt | None = None
    """Passes over the prompts that are trained on; the run ends at this or at `max_num_steps`, whichever is first. The
    schedule and the last validation use the resulting number of steps; `use_dynamic_sampling` draws more prompts than it
    trains on. null: no limit."""

    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of their group."""

    use_leave_one_out_baseline: bool = True
    """Baseline: the mean reward of the group's other completions. false: of the whole group."""

    use_dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and generate others in their place (DAPO)."""

    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Batches dropped for one step before the run fails."""

    overlong_filtering: bool = False
    """Exclude completions that were cut off by their length from the loss."""

    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """Penalty for overlong completions."""

    overlap_logprobs: bool = False
    """Compute log-probabilities of finished sequences while the rest of the batch is generated. Needs separate train GPUs.
    Rows are batched in the order they finish, so results may differ in their last bits from run to run."""

    overlap_training: bool = False
    """Accumulate gradients of scored groups while the rest of the batch is generated. Needs `overlap_logprobs` and one
    optimizer step per batch (`train_global_batch_size` = prompts x generations)."""

    async_grpo: AsyncGrpoConfig = AsyncGrpoConfig()
    """Asynchronous GRPO."""

    val_period: NonNegativeInt = 10
    """Steps between validations. 0: only at the start and the end."""

    val_at_start: bool = True
    """Validate before the first step."""

    max_val_samples: PositiveInt = 256
    """Maximum number of samples per validation."""


class SftConfig(Section):
    """Supervised fine-tuning: the whole run with algorithm `sft`, a warm start with `grpo`."""

    max_num_steps: NonNegativeInt = derived(
        100, "GRPO: 0 if `max_num_epochs` is not set; else `max_num_epochs` passes over the demonstrations, or one"
    )
    """Number of steps. 0 with algorithm `grpo`: no SFT first."""

    max_num_epochs: PositiveInt | None = None
    """Passes over the demonstrations; SFT ends at this or at `max_num_steps`, whichever is first. null: no limit."""

    val_period: NonNegativeInt = 20
    """Steps between validations. 0: only at the start and the end."""

    val_at_start: bool = True
    """Validate before the first step."""

    max_val_samples: PositiveInt = 256
    """Maximum number of samples per validation."""

    lr: PositiveFloat | None = derived(None, "GRPO: 1e-5 if there are SFT steps and no rate is set")
    """Learning rate, constant over the SFT steps. null: `policy.megatron_cfg.optimizer.lr`, which follows
    `megatron_cfg.scheduler` with algorithm `sft` and is constant with `grpo`."""


class DataSourceConfig(Section):
    """Examples from files, a dataset (`path`) or a callable (`task`)."""

    path: PathText | None = None
    """A JSONL file of prompt and response or of messages (and `tools`); a Hugging Face dataset on disk (written by
    `save_to_disk`, a Parquet or Arrow file, or a directory of data files); or one on the Hub, `owner/name`."""

    subset: str | None = None
    """Subset of the dataset, such as `main` of openai/gsm8k. null: its only one."""

    val_path: PathText | None = None
    """Validation examples, in the formats of `path`. null: `val_split`, or else a share `val_fraction` of `path`."""

    split: str = "train"
    """Split of the dataset to train on."""

    val_split: str | None = None
    """Split of the dataset to validate on."""

    val_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of `path` held out for validation if there is neither `val_path` nor `val_split`."""

    task: str | None = None
    """Import path of a callable that makes the examples, such as `dagrl.rl.tasks:arithmetic`. Replaces `path`."""

    task_args: dict[str, Json] = Field(default_factory=dict)
    """Keyword arguments of `task`."""

    prompt_key: str = "prompt"
    """Column of the prompt."""

    response_key: str = "response"
    """Column of the response, the reference of GRPO."""

    messages_key: str = "messages"
    """Column of the messages of a conversation."""


class MixtureConfig(DataSourceConfig):
    """One of several sources of examples, with the keys of `data`."""

    weight: PositiveFloat | None = None
    """Share of the examples that are drawn from it, relative to the other weights. null: its number of examples."""


class DataConfig(DataSourceConfig):
    """Training and validation examples: of one source (`path` or `task`), or of several (`mixture`)."""

    mixture: dict[str, MixtureConfig] = Field(default_factory=dict)
    """Several sources by task name. Each batch has their examples in the shares of their weights. Rewards get the name as
    `task`, and there are metrics for each. Replaces `path` and `task`."""

    apply_chat_template: bool = derived(False, "true if the tokenizer has a chat template")
    """Make a conversation of each prompt and response: a user turn and an assistant turn."""

    system_prompt: str | None = None
    """System message in front of each conversation that has none. null: none."""

    shuffle: bool = True
    """Shuffle the examples in every epoch."""

    seed: Seed = 0
    """Seed of the shuffling and of the held-out share."""

    assistant_turns: Literal["all", "each", "last"] = "all"
    """Assistant turns of a conversation that SFT learns. `all`: every turn, in one row; the chat template must only append,
    or mark what is generated. `each`: every turn, each in a row that ends with it. `last`: the last turn only."""

    too_long: Literal["error", "drop"] = "error"
    """What to do with an example longer than the largest bucket."""


class ProcessConfig(Section):
    """How a user's functions and environments run. See `dagrl.rl.functions`."""

    timeout_s: PositiveFloat = 10.0
    """Deadline of one answer, in seconds."""

    call_timeout_s: PositiveFloat | None = None
    """Deadline of a whole call, including the samples of a failed batch that are retried one at a time. null: 4 *
    `timeout_s`; none if the function takes one sample at a time and is not a coroutine function."""

    start_timeout_s: PositiveFloat = 60.0
    """Deadline for a process to import the function. The first process to miss it ends the run."""

    num_workers: PositiveInt = 1
    """Processes that run the function."""

    max_concurrency: PositiveInt | None = None
    """Calls of a coroutine function of single samples under way at once in each process, such as requests to a remote
    judge. Waiting calls have not begun their `timeout_s`. null: all samples of a group."""

    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """Largest share of failed samples in a training step or a validation; above it the run ends. A training step in which
    all samples fail always ends it."""


class FunctionConfig(ProcessConfig):
    """How a user's function of texts runs."""

    batched: bool = True
    """The function takes lists of texts. false: the texts of one sample."""


class RewardFunctionConfig(FunctionConfig):
    """One of several reward functions; see `reward.functions`."""

    function: str
    """Import path of the reward function."""

    tasks: tuple[str, ...] | None = None
    """Tasks of `data.mixture` whose samples it rewards. null: all."""


class RewardConfig(FunctionConfig):
    """The reward of a sample: of one function, or the weighted sum of several; see docs/rewards.md."""

    function: str | None = "dagrl.rl.rewards:exact_match"
    """Import path of the reward function. null: the only rewards are those of the environment's turns."""

    functions: dict[str, RewardFunctionConfig] = Field(default_factory=dict)
    """Several reward functions by name, each with its own deadlines and processes. Replaces `function`."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each named part in the reward; 1 for parts without one. Parts are the keys that `function` returns; of
    `functions` they are the function's name, or `<name>/<key>`."""

    shuffle: bool = False
    """Permute the rewards over the samples: a control run that cannot learn."""


class EnvironmentConfig(ProcessConfig):
    """The environment of multi-turn rollouts: answers each turn of the policy. See docs/rewards.md."""

    function: str | None = None
    """Import path of a class, or of a function that returns an object, with the methods `reset`, `step` and `close`, such as
    `my_task:Calculator`. It is called for each sequence. null: sequences have one turn."""

    args: dict[str, Json] = Field(default_factory=dict)
    """Keyword arguments of `function`."""

    tools: tuple[str, ...] = ()
    """Import paths of Python functions that the policy may call, instead of `function`. The chat template shows their JSON
    schemas; a turn without a call ends the sequence."""

    tool_parser: str = "hermes"
    """vLLM's parser of the model's tool calls, as in `vllm serve --tool-call-parser`."""

    max_turns: PositiveInt = 4
    """Maximum number of policy turns per sequence."""

    @property
    def enabled(self) -> bool:
        """Whether sequences have an environment."""
        return self.function is not None or bool(self.tools)


class PhasesConfig(Section):
    """Import paths of the phases that the loops replay. Replace any of them with your own."""

    sft_step: str = "dagrl.graphs.train:sft_step"
    """One SFT step."""

    train_step: str = "dagrl.graphs.train:train_step"
    """One GRPO optimizer step."""

    accumulate_gradients: str = "dagrl.graphs.train:accumulate_gradients"
    """Gradients of a part of a batch, for `grpo.overlap_training`."""

    evaluate: str = "dagrl.graphs.train:evaluate"
    """The validation loss of SFT."""

    logprobs: str = "dagrl.graphs.logprobs:logprobs"
    """Log-probabilities under the policy."""

    reference_logprobs: str = "dagrl.graphs.logprobs:reference_logprobs"
    """Log-probabilities under the reference policy."""

    logprob_inference_prep: str = "dagrl.graphs.prepare:logprob_inference_prep"
    """Prepares the train workers for log-probabilities."""

    training_prep: str = "dagrl.graphs.prepare:training_prep"
    """Prepares the train workers for training."""

    calibrate_kv_scales: str = "dagrl.graphs.calibrate:calibrate_kv_scales"
    """Calibrates the scales of an FP8 KV cache."""

    generate: str = "dagrl.graphs.generate:generate"
    """One quantum of generation."""

    refit: str = "dagrl.graphs.refit:refit"
    """Sends the weights to the generation workers."""


class CheckpointConfig(Section):
    """Checkpoints."""

    enabled: bool = True
    """Save checkpoints."""

    checkpoint_dir: PathText | None = None
    """Directory of the checkpoints. null: `<run>/checkpoints`."""

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

    entity: str | None = None
    """User or team that owns the project. null: your default."""

    name: str | None = None
    """Name of the run. null: `name`."""

    tags: tuple[str, ...] = ()
    """Tags of the run."""


class MlflowConfig(Section):
    """MLflow."""

    experiment_name: str = "dagrl"
    """Experiment of the run; created if it does not exist."""

    run_name: str | None = None
    """Name of the run. null: `name`."""

    tracking_uri: str | None = None
    """Server or store, such as `http://mlflow:5000` or `sqlite:///runs/mlflow.db`. null: `MLFLOW_TRACKING_URI`, or MLflow's
    own default."""


class TrackioConfig(Section):
    """trackio."""

    project: str = "dagrl"
    """Project of the run."""

    name: str | None = None
    """Name of the run. null: `name`."""

    space_id: str | None = None
    """Space on the Hugging Face Hub that shows the run, such as `me/runs`. null: a database on this machine."""


class LoggerConfig(Section):
    """Logs and metrics."""

    tensorboard_enabled: bool = True
    """Write metrics for TensorBoard."""

    wandb_enabled: bool = False
    """Send metrics to Weights & Biases."""

    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""

    mlflow_enabled: bool = False
    """Send metrics to MLflow."""

    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""

    trackio_enabled: bool = False
    """Send metrics to trackio."""

    trackio: TrackioConfig = TrackioConfig()
    """trackio."""

    rollouts_enabled: bool = True
    """Keep every trained sample in `rollouts/`, for `dagrl view`."""

    rollouts_max_bytes: PositiveInt | None = 10 << 30
    """Largest size of `rollouts/`. Above it the oldest steps are deleted. null: no limit."""

    trace_enabled: bool = True
    """Write `trace.json`, a timeline of the run for Perfetto."""

    nvtx_enabled: bool = False
    """Annotate phases, replays and buckets for Nsight Systems and torch.profiler."""

    plot_enabled: bool = True
    """Draw the run's curves at its end."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged."""


class ClusterConfig(Section):
    """The Ray cluster. CPUs, GPUs, memory and directory apply to a cluster that dagrl starts, not to one at `address`."""

    address: str | None = None
    """Address of a running Ray cluster. null: start Ray on this machine."""

    num_cpus: PositiveInt | None = None
    """CPUs that Ray offers on this machine. null: all."""

    num_gpus: NonNegativeInt | None = None
    """GPUs that Ray offers on this machine. null: all."""

    gpus_per_worker: NonNegativeFloat | None = None
    """GPUs of each worker; a fraction lets workers share one. null: 1 if the machine has GPUs, else 0."""

    max_workers: PositiveInt | None = None
    """Maximum number of workers. null: one per GPU, or 8 per CPU core on a machine without GPUs."""

    object_store_memory: PositiveInt = 256 << 20
    """Bytes of Ray's object store."""

    temp_dir: PathText | None = None
    """Ray's directory for sockets and logs. null: `/tmp/ray`."""


class TimeoutConfig(Section):
    """Deadlines in seconds. Every wait of a run has one of these."""

    start_s: PositiveFloat = derived(180.0, "GPUs: 600; else 180")
    """Start the workers and load the model."""

    compile_s: PositiveFloat = 60.0
    """Prepare the workers for a graph, and again to compile it."""

    warmup_s: PositiveFloat = derived(180.0, "GPUs: 600; else 180")
    """One warm-up replay."""

    replay_s: PositiveFloat = derived(120.0, "GPUs: 600; else 120")
    """One replay."""

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
        return self._deadline("replay_s")

    @property
    def checkpoint(self) -> Deadline:
        """Twice `checkpoint_s`, and its key: the workers' own deadline comes first, and their error says what is late."""
        return self._deadline("checkpoint_s").times(2)

    def _deadline(self, name: str) -> Deadline:
        return Deadline(getattr(self, name), f"timeouts.{name}")


class ExecutorConfig(Section):
    """How phases are executed."""

    engine: Literal["dagrl", "ray"] = "dagrl"
    """What runs compiled graphs. `dagrl`: our own loop and channels, on the Ray versions listed in docs/runtime.md. `ray`:
    Ray's loop and channels, unpatched, with the same results and more time per replay; also what runs on any other Ray."""

    fuse_shards: bool = False
    """Compile the data-parallel shards of a host into one graph. By default each shard has a graph of its own, which
    replays, fails and is replaced by itself. A fused graph costs less per replay and compiles faster, but fails as a whole.
    """

    max_in_flight: PositiveInt | dict[str, PositiveInt] = 2
    """Replays of a phase under way at once; a further one waits for the oldest. A mapping sets it per phase, by the phase's
    name, and for all others under `default`: `{default: 2, generate: 3}`."""

    overlap_communication: bool = False
    """Overlap transfers between accelerators with computation, in phases with such edges (`.via("nccl")`)."""

    arity: int = Field(default=8, ge=2)
    """Children of a node in the tree that joins results; measured in docs/scaling.md."""

    result_bytes: int = Field(default=1 << 20, ge=1 << 14)
    """Bytes reserved for a result. Inputs are sized by the largest bucket."""


def _directory_name(name: str) -> str:
    if "\0" in name or name == ".." or not name or Path(name).name != name:
        raise ValueError("a plain directory name, without slashes")
    return name


class Config(Section):
    """The configuration of a run."""

    name: Annotated[str, AfterValidator(_directory_name)]
    """Name of the run and of its directory in `output_dir`."""

    algorithm: Literal["sft", "grpo"]
    """The training algorithm."""

    seed: Seed = 0
    """Seed of sampling, and of everything without a seed of its own."""

    output_dir: PathText = "runs"
    """Parent directory of the run's directory."""

    executor: Literal["compiled", "eager"] = "compiled"
    """`compiled`: Ray Compiled Graphs. `eager`: plain actor calls, with the same results."""

    fallback: Literal["eager", "error"] = "eager"
    """What to do if a phase cannot be compiled: run it eagerly, or fail."""

    on_failure: Literal["stop", "restart"] = "stop"
    """After a worker raised, died or hung: end the run, or restart it from the newest checkpoint."""

    max_restarts: PositiveInt = 3
    """Maximum number of restarts."""

    executor_cfg: ExecutorConfig = ExecutorConfig()
    """How phases are executed."""

    policy: PolicyConfig
    """The model, how it trains and how it generates."""

    loss_fn: LossConfig = LossConfig()
    """The policy loss."""

    advantage: AdvantageConfig = AdvantageConfig()
    """How advantages come from rewards."""

    grpo: GrpoConfig = GrpoConfig()
    """The GRPO loop."""

    sft: SftConfig = SftConfig()
    """Supervised fine-tuning. With algorithm `grpo`: a short SFT first, if `sft.max_num_steps` is not 0."""

    data: DataConfig
    """Training and validation examples."""

    reward: RewardConfig = RewardConfig()
    """The reward function."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """The environment of multi-turn rollouts."""

    refit: RefitConfig = RefitConfig()
    """How weights are sent from train to generation workers."""

    phases: PhasesConfig = PhasesConfig()
    """Import paths of the phases."""

    checkpointing: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""

    logger: LoggerConfig = LoggerConfig()
    """Logs and metrics."""

    cluster: ClusterConfig = ClusterConfig()
    """The Ray cluster."""

    timeouts: TimeoutConfig = TimeoutConfig()
    """Deadlines."""
