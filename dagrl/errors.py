"""Every error that dagrl raises on purpose.

DagrlError
├── UserError                what the user can fix; the command exits with code 2
│   ├── ConfigError            a key, a type, a value or an import path in the configuration
│   ├── LayoutError            parallel sizes that do not fit the model, the batch or the machine
│   ├── DataError              a data file, one line of it, or a sequence that does not fit
│   ├── GraphError             a phase that cannot be traced
│   ├── RefitPlanError         weights that only one side has, or boxes that do not cover a parameter
│   ├── CheckpointError        a checkpoint that is missing, truncated or from another run
│   └── MissingDependencyError an optional package; names the extra that installs it
└── RunError                 a failure during the run
    ├── WorkerError            workers raised or died in a plain call
    │   └── PhaseError           workers raised, died or hung in a phase
    ├── ChannelError           a channel broke, timed out, or was given something it cannot carry
    ├── ClusterError           a process of Ray itself ended under a run
    └── DeadlineError          a wait passed its configured deadline

Every message says what was found, what was expected and what to do.
"""

from collections.abc import Iterable
from dataclasses import dataclass


class DagrlError(Exception):
    """Base of every error raised by dagrl."""


class UserError(DagrlError):
    """An error that the user can fix. Nothing has been lost."""


class ConfigError(UserError):
    """The configuration names something unknown, of a wrong type or out of range."""


class LayoutError(UserError):
    """Parallel sizes that do not fit each other, the model, the batch or the machine."""


class DataError(UserError):
    """A data file, or one line of it, cannot be used."""


class GraphError(UserError):
    """A phase function cannot be traced into a `PhaseGraph`."""


class RefitPlanError(UserError):
    """Sources and destinations of a refit do not match."""


class CheckpointError(UserError):
    """A checkpoint is missing, truncated or was made by something else."""


class MissingDependencyError(UserError):
    """An optional package is not installed."""


class RunError(DagrlError):
    """Something failed after the run had started."""


class ChannelError(RunError):
    """A channel broke, or was given something that it cannot carry."""


class ClusterError(RunError):
    """A process of Ray itself ended under a run."""


class DeadlineError(RunError):
    """A wait passed its configured deadline."""


@dataclass(frozen=True)
class WorkerFailure:
    """What one worker reported of its own failure. Plain data, so that any graph edge can carry it.

    `kind` is `raised`, `died` or `hung`. `traceback` is the worker's own traceback, or its stacks if it hung. In a plain
    call, outside any phase, `phase` is empty and `node` is the method. In a phase `node` is empty if the worker died before
    it could say what it ran. `pid` is 0 while a worker starts and its pid is
    unknown.
    """

    role: str
    rank: int
    coordinates: str
    host: str
    pid: int
    phase: str
    replay: int
    node: str
    kind: str
    message: str
    traceback: str
    time_ns: int = 0  # since the epoch; the earliest failure is likely the cause

    def describe(self) -> str:
        """Returns one line that says which worker failed, where and how."""
        place = f"; host {self.host}, pid {self.pid}" if self.pid else ""
        node = f", node {self.node!r}" if self.node else ""
        within = f"phase {self.phase!r}, replay {self.replay}{node}" if self.phase else repr(self.node)
        return f"{self.role} worker {self.rank} ({self.coordinates}{place}) {self.kind} in {within}: {self.message}"


FULL = "The GPU's memory is full. "
ENGINE_IS_FULL = FULL + (
    "Lower policy.generation.vllm_cfg.kv_cache_memory_bytes, gpu_memory_utilization, max_num_seqs or "
    "vllm_kwargs.max_num_batched_tokens, or raise tensor_parallel_size"
)
TRAINER_IS_FULL = FULL + (
    "Lower policy.train_micro_batch_size (with sequence packing, train_mb_tokens and logprob_mb_tokens), or set "
    "policy.megatron_cfg.activation_checkpointing=true. On GPUs shared with generation, a lower "
    "policy.generation.vllm_cfg.kv_cache_memory_bytes or policy.generation.colocated.exchange=always leaves more"
)


class WorkerError(RunError):
    """Workers failed. `failures` holds one `WorkerFailure` per worker that is known to have failed, the cause first."""

    def __init__(self, failures: tuple[WorkerFailure, ...], advice: str = "") -> None:
        self.failures = failures
        lines = [failure.describe() for failure in failures]
        lines += [failures[0].traceback.rstrip()] if failures and failures[0].traceback else []
        if failures and "OutOfMemoryError" in failures[0].message:
            advice = advice or (ENGINE_IS_FULL if failures[0].role == "generation" else TRAINER_IS_FULL)
        lines += [advice] if advice else []
        super().__init__("\n".join(lines))


class PhaseError(WorkerError):
    """A replay failed.

    `breaks` says why the graphs must be compiled again before the next replay. It is empty if they need not, because no
    worker died or hung.
    """

    def __init__(self, failures: tuple[WorkerFailure, ...], advice: str = "", breaks: str = "") -> None:
        super().__init__(failures, advice)
        gone = [failure for failure in failures if failure.kind != "raised"]
        self.breaks = f"{gone[0].role} worker {gone[0].rank} {gone[0].kind} in phase {gone[0].phase!r}" if gone else breaks


def error_text(error: BaseException) -> str:
    """Returns the type and message of an error, even if its `str()` raises."""
    try:
        return printable(f"{type(error).__name__}: {error}")
    except Exception as failed:
        return f"{type(error).__name__}, whose str() raised {type(failed).__name__}"


def error_line(error: BaseException) -> str:
    """Returns the type and message of an error on one line; those of libraries have several."""
    return " ".join(error_text(error).split())


def printable(text: str) -> str:
    """Returns the text with lone surrogates (from cut texts) escaped, so that it can be written to a file or a terminal."""
    return text.encode(errors="backslashreplace").decode()


def cause_first(failures: Iterable[WorkerFailure]) -> tuple[WorkerFailure, ...]:
    """Sorts deaths before exceptions, because a death makes the workers that wait for it raise; then by time."""
    return tuple(sorted(failures, key=lambda failure: (failure.kind != "died", failure.time_ns)))


class StopRequestedError(Exception):
    """A stop was requested (Ctrl-C or SIGTERM), and this is a safe point to leave the loop. Not a failure of the run."""
