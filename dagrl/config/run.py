"""The configuration of a run: one YAML file, overridden by `a.b=c` words, checked before anything starts.

Keys and defaults follow NeMo-RL where it has them (`policy.*`, `grpo.*`, `loss_fn.*`, `checkpointing.*`), so that its users
find their way. Every model forbids unknown keys. The resolved configuration is saved with the run. The section `policy`, the
longest, is written down in `dagrl.config.policy`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dagrl.config.policy import PolicyConfig
from dagrl.config.section import Json, PathText, Section, Seed
from dagrl.deadline import Deadline


class LossConfig(Section):
    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    ratio_clip_min: NonNegativeFloat = 0.2
    ratio_clip_max: NonNegativeFloat = 0.2
    token_level_loss: bool = True
    # With one optimizer step a batch (train_global_batch_size = prompts x generations) the policy's log-probabilities before
    # it are those that its own forward pass finds: true takes them from there, and leaves their computation out.
    force_on_policy_ratio: bool = False
    use_importance_sampling_correction: bool = False  # weight by exp(prev - generation log-probability)
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    truncated_importance_sampling_ratio: PositiveFloat | None = None  # upper bound; None: weights as they are
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None  # lower bound of icepop and seq-mask-tis


class AsyncGrpoConfig(Section):
    enabled: bool = False
    max_trajectory_age_steps: NonNegativeInt = 1  # versions between a group's start and the step that trains on it
    in_flight_weight_updates: bool = False  # update between two quanta; off: running requests finish first
    recompute_kv_cache_after_weight_updates: bool = False  # off: running requests go on from the KV cache they have
    on_checkpoint: Literal["save", "regenerate"] = "save"  # what a resumed run does with groups not yet trained on


class RefitConfig(Section):
    """How weights go from train to generation workers."""

    verify: Literal["off", "checksum", "bitwise"] = "off"  # proof, after each refit, that what arrived is what was sent
    bucket_bytes: PositiveInt | None = None  # None: 64 to 512 MB by the model's size; colocated 256 at most, by the ranks
    kv_scale_margin: float = Field(default=1.0, ge=1)  # scales of an FP8 KV cache, relative to what calibration asks for
    replicate_in_host: bool = True  # a byte goes to a host once, and from there to the others that want it
    cuda_graph: bool | Literal["auto"] = "auto"  # GPUs: replay it as one captured CUDA graph; auto: try, keep the faster
    gpus_per_host: PositiveInt = 8  # dagrl inspect: how ranks lie on hosts
    in_host_gb_per_s: PositiveFloat = 450.0  # a link's speed a direction, in a host and between hosts: orders messages
    between_hosts_gb_per_s: PositiveFloat = 50.0


class RewardShapingConfig(Section):
    """Soft punishment of overlong completions (DAPO, arXiv:2503.14476, equation 13)."""

    enabled: bool = False
    max_response_length: PositiveInt | None = None  # None: policy.generation.max_new_tokens
    overlong_buffer_length: PositiveInt = 128  # tokens before max_response_length over which the penalty grows
    overlong_buffer_penalty: NonNegativeFloat = 1.0  # of a completion of max_response_length


class GrpoConfig(Section):
    num_prompts_per_step: PositiveInt = 16
    num_generations_per_prompt: PositiveInt = Field(default=8, ge=2)
    max_num_steps: PositiveInt = 100
    # Over the prompts that are trained on; a run ends at whichever limit comes first. How many steps that is, which schedule
    # and last validation go by, is known at the start: with use_dynamic_sampling more prompts are drawn than trained on.
    max_num_epochs: PositiveInt | None = None
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    use_dynamic_sampling: bool = False  # drop groups whose rewards are all equal, and generate others in their place
    dynamic_sampling_max_gen_batches: PositiveInt = 10  # batches dropped for one step before the run gives up
    overlong_filtering: bool = False  # completions cut off by their length teach nothing
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    # With train GPUs of its own: while training waits for the rest of a batch, log-probabilities of its finished sequences
    # are computed, under the weights of the step. Rows are batched by when they finish, so numbers may differ in their last
    # bits from run to run.
    overlap_logprobs: bool = False
    # And gradients of its scored groups are accumulated: of the step the last groups and the update are left. Needs
    # overlap_logprobs, and one optimizer step a batch (train_global_batch_size = prompts x generations).
    overlap_training: bool = False
    async_grpo: AsyncGrpoConfig = AsyncGrpoConfig()
    val_period: NonNegativeInt = 10  # 0: only at the start and the end
    val_at_start: bool = True
    max_val_samples: PositiveInt = 128


class SftConfig(Section):
    max_num_steps: NonNegativeInt = 100
    max_num_epochs: PositiveInt | None = None  # over the demonstrations; SFT ends at whichever limit comes first
    val_period: NonNegativeInt = 20
    val_at_start: bool = True
    max_val_samples: PositiveInt = 256
    # Constant over the SFT steps. None: policy.megatron_cfg.optimizer.lr, with algorithm `sft` by megatron_cfg.scheduler.
    lr: PositiveFloat | None = None


class DataConfig(Section):
    """`path` is a JSONL file of prompt/response or messages (and `tools`), a Hugging Face dataset on disk (what
    `save_to_disk` wrote, a Parquet or Arrow file, a directory of data files) or on the Hub (`owner/name`), or `task` the
    import path of a callable that makes examples.
    """

    path: PathText | None = None
    subset: str | None = None  # of a dataset that has several, such as `main` of openai/gsm8k
    val_path: PathText | None = None  # None: `val_fraction` of `path` is held out, unless val_split names a split of it
    split: str = "train"  # of a dataset with several
    val_split: str | None = None
    val_fraction: float = Field(default=0.05, ge=0, lt=1)
    task: str | None = None  # e.g. dagrl.tasks:arithmetic
    task_args: dict[str, Json] = Field(default_factory=dict)
    prompt_key: str = "prompt"
    response_key: str = "response"
    messages_key: str = "messages"
    shuffle: bool = True
    seed: Seed = 0
    # Assistant's turns that SFT learns of a conversation: all, in one row, if the chat template only appends or marks what
    # is generated; each in a row that ends with it, as it is rendered when it is generated; or the last alone.
    assistant_turns: Literal["all", "each", "last"] = "all"
    too_long: Literal["error", "drop"] = "error"  # what becomes of an example longer than the largest bucket


class FunctionConfig(Section):
    """How a function of texts is run; see `dagrl.function_runner`."""

    batched: bool = True  # the function takes lists of texts; off: one sample
    timeout_s: PositiveFloat = 10.0
    # Of a call as a whole, in which the samples of a batch that failed are asked again, one at a time. None: 4 * timeout_s;
    # with batched: false, and no coroutine, samples are asked one after the other anyway, and None is no bound for them all.
    call_timeout_s: PositiveFloat | None = None
    start_timeout_s: PositiveFloat = 60.0  # until a process has imported the function; missed at first, it ends the run
    num_workers: PositiveInt = 1  # processes that run it
    max_failed_share: float = Field(default=0.5, ge=0, le=1)  # of a step's samples or a validation's; more end the run,
    # and so do all samples of a training step, whatever the share


class RewardConfig(FunctionConfig):
    function: str = "dagrl.rewards:exact_match"
    shuffle: bool = False  # give every sample another sample's reward: a control run that cannot learn


class EnvironmentConfig(FunctionConfig):
    """What answers a completion, so that the sequence goes on; see `dagrl.environments`."""

    function: str | None = None  # e.g. my_task:answer; None: a sequence has one turn
    max_turns: PositiveInt = 4


class PhasesConfig(Section):
    """Import paths of the phases that the loops replay; put your own in place of any of them."""

    sft_step: str = "graphs.train:sft_step"
    train_step: str = "graphs.train:train_step"
    accumulate_gradients: str = "graphs.train:accumulate_gradients"
    evaluate: str = "graphs.train:evaluate"
    logprobs: str = "graphs.logprobs:logprobs"
    reference_logprobs: str = "graphs.logprobs:reference_logprobs"
    logprob_inference_prep: str = "graphs.prepare:logprob_inference_prep"
    training_prep: str = "graphs.prepare:training_prep"
    calibrate_kv_scales: str = "graphs.calibrate:calibrate_kv_scales"
    generate: str = "graphs.generate:generate"
    refit: str = "graphs.refit:refit"


class CheckpointConfig(Section):
    enabled: bool = True
    checkpoint_dir: PathText | None = None  # None: <run>/checkpoints
    save_period: PositiveInt = 10
    keep_top_k: PositiveInt | None = None  # the best by metric_name; None, and keep_last_k too: keep all
    keep_last_k: PositiveInt | None = None  # and the newest, one at least
    metric_name: str | None = None  # e.g. validation/reward, of the step that is saved; None: keep_top_k keeps the newest
    higher_is_better: bool = True
    async_save: bool = False  # train workers write while the run goes on
    resume: bool = False  # go on from the newest checkpoint of this run, if there is one
    export_hf: bool = True  # write the final policy as Hugging Face safetensors


class LoggerConfig(Section):
    tensorboard_enabled: bool = True
    wandb_enabled: bool = False
    trace_enabled: bool = True
    nvtx_enabled: bool = False  # names phases, replays and buckets for Nsight Systems and torch.profiler
    plot_enabled: bool = True
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


class ClusterConfig(Section):
    address: str | None = None  # a running Ray cluster; None: start one on this machine
    num_cpus: PositiveInt | None = None  # None: what the machine has
    num_gpus: NonNegativeInt | None = None
    gpus_per_worker: NonNegativeFloat | None = None  # None: 1 where the machine has GPUs, else 0
    max_workers: PositiveInt | None = None  # None: 8 a CPU core without GPUs, 1 a GPU with them
    object_store_memory: PositiveInt = 256 << 20  # bytes
    temp_dir: PathText | None = None


class TimeoutConfig(Section):
    """Deadlines in seconds; every wait of a run is one of these."""

    start_s: PositiveFloat = 180.0  # workers built and models loaded
    compile_s: PositiveFloat = 60.0  # for workers to make ready for a graph, and then for Ray to compile it
    warmup_s: PositiveFloat = 180.0  # one warm-up replay
    replay_s: PositiveFloat = 120.0
    grace_s: PositiveFloat = 30.0  # after a worker raised in a replay, for the others to end it; about what a restart takes
    collective_s: PositiveFloat = 60.0
    checkpoint_s: PositiveFloat = 120.0
    teardown_s: PositiveFloat = 8.0

    @property
    def replay(self) -> Deadline:
        """`replay_s`, with its key: also of what workers do between two replays."""
        return self._deadline("replay_s")

    @property
    def checkpoint(self) -> Deadline:
        """Twice `checkpoint_s`, with its key: the workers' own deadline comes first, and they say what is late."""
        return self._deadline("checkpoint_s").times(2)

    def _deadline(self, name: str) -> Deadline:
        return Deadline(getattr(self, name), f"timeouts.{name}")


class ExecutorConfig(Section):
    max_in_flight: PositiveInt = 2
    arity: int = Field(default=8, ge=2)  # children of a node of the tree that joins results; measured in docs/scaling.md
    result_bytes: int = Field(default=1 << 20, ge=1 << 14)  # room for a result; inputs are sized from the largest bucket


def _directory_name(name: str) -> str:
    if "\0" in name or name == ".." or not name or Path(name).name != name:
        raise ValueError("a plain directory name, without slashes")
    return name


class Config(Section):
    name: Annotated[str, AfterValidator(_directory_name)]  # of the run's directory in output_dir
    algorithm: Literal["sft", "grpo"]
    seed: Seed = 0
    output_dir: PathText = "runs"
    executor: Literal["compiled", "eager"] = "compiled"
    fallback: Literal["eager", "error"] = "eager"
    on_failure: Literal["stop", "restart"] = "stop"  # when a worker raised, died or hung: end, or resume
    max_restarts: PositiveInt = 3
    executor_cfg: ExecutorConfig = ExecutorConfig()
    policy: PolicyConfig
    loss_fn: LossConfig = LossConfig()
    grpo: GrpoConfig = GrpoConfig()
    sft: SftConfig = SftConfig()  # for algorithm grpo: a short SFT phase first, when sft.max_num_steps > 0
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    refit: RefitConfig = RefitConfig()
    phases: PhasesConfig = PhasesConfig()
    checkpointing: CheckpointConfig = CheckpointConfig()
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig = ClusterConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
