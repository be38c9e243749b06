"""The jobs of `run_all`, in parts: the command, the GPUs and cores it needs, and the files it writes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIMIT_S = 560
"""Per job: it fits into ten minutes with the start of `run_all` and the end of processes that the job leaves."""

TRAIN, GENERATION = "policy.megatron_cfg", "policy.generation.vllm_cfg"

TESTS_FOR_TWO = (
    "channel_ipc_between",
    "channel_nccl",
    "end_to_end",
    "faults",
    "megatron_nccl",
    "pipeline_nccl",
    "plain_broadcast",
    "vllm_tp",
)
"""Files of `tests/gpu` whose tests all need two GPUs."""


@dataclass(frozen=True)
class Job:
    """One command of a part. In its words `{out}` stands for the directory of results, `{models}` for one of models, which
    is deleted at the end, and `{seconds}` for the time left to measure. `bench` names its `dagrl bench` measurement.
    """

    part: str
    name: str
    command: tuple[str, ...]
    gpus: int = 1
    cores: int = 1
    bench: str = ""
    limit_s: int = LIMIT_S
    before: tuple[str, ...] = ()  # a command that prepares the job


def jobs(gpus: int) -> list[Job]:
    """Returns all jobs in order; those whose layout depends on the host are for `gpus` GPUs."""
    return [
        *_tests(),
        _bench("overhead", *DEADLINE, gpus=0, cores=4),
        _bench("refit", *DEADLINE, gpus=2),
        *(
            _bench("train", "--cases", *cases, *sizes, *DEADLINE, gpus=least, name=name)
            for name, least, cases in TRAINING
            for sizes in [() if "30b" in name else LARGE_MICROBATCHES]
        ),
        *_steps(gpus),
        *(
            replace(_bench("peers", "--cases", *cases, *words, *DEADLINE, gpus=1, name=name, plot=False), part="peers")
            for name, cases, words in PEERS
        ),
        *(Job("runs", f"run-{name}", _train(name, config, words), least) for name, config, least, words in RUNS),
        *_faults(gpus),
    ]


PEERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("peers-0.6b-grpo", ("grpo 0.6b 128", "grpo 0.6b 512"), ("--steps", "3")),
    ("peers-0.6b-sft", ("sft 0.6b 16",), ()),
    ("peers-0.6b-generate", ("generate 0.6b 64", "generate 0.6b 256", "generate 0.6b 1024"), ("--steps", "2")),
    ("peers-0.6b-2048", ("grpo 0.6b 2048",), ("--apart", "--steps", "2")),
    ("peers-0.6b-long", ("grpo 0.6b 64",), ("--completion", "8192", "--apart", "--micro", "2", "--steps", "2")),
    ("peers-fp8-grpo", ("grpo 0.6b 512",), ("--peers", "dagrl-fp8-kv", "--steps", "3")),
    ("peers-fp8-generate", ("generate 4b 256",), ("--peers", "dagrl-fp8", "dagrl-fp8-kv", "--steps", "2")),
    ("peers-4b", ("grpo 4b 512", "sft 4b 16"), ("--apart", "--micro", "8", "--steps", "2")),
)
"""Name, cases and options of `bench peers`; all on one GPU."""


DEADLINE = ("--deadline", "{seconds}")


def _python(module: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *words)


def _bench(bench: str, *words: str, gpus: int, cores: int = 1, name: str = "", plot: bool = True) -> Job:
    name = name or bench
    files = ("--json", f"{{out}}/{name}.json", *(("--plot", f"{{out}}/{name}.png") if plot else ()))
    command = _python("dagrl.cli.main", "bench", bench, *words, *files)
    return Job(bench, name, command, gpus, cores, bench)


def _tests() -> list[Job]:
    """Returns one job per file, each with its own limit."""
    names = sorted(path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    command = _python("pytest", "-m", "gpu", "-q", "-rA")
    return [
        Job("tests", f"tests-{name}", (*command, f"tests/gpu/test_{name}.py"), 2 if name in TESTS_FOR_TWO else 1)
        for name in names
    ]


TRAINING: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("train-0.6b", 1, ("0.6b:dp1", "0.6b:dp1m")),
    ("train-0.6b-2", 2, ("0.6b:dp1!", "0.6b:tp2", "0.6b:cp2", "0.6b:dp2d")),
    ("train-4b-2", 2, ("4b:dp1!", "4b:tp2")),
    ("train-30b-2", 2, ("30b@4:dp1!", "30b@4:dp2ep2d")),
    ("train-0.6b-4", 4, ("0.6b:dp1!", "0.6b:tp2pp2", "0.6b:tp4")),
    ("train-4b-4", 4, ("4b:dp1!", "4b:tp2pp2", "4b:tp4")),
    ("train-30b-4", 4, ("30b@4:dp1!", "30b@4:dp4ep4d")),
    ("train-4b-8", 8, ("4b:dp1!", "4b:tp2pp2dp2d", "4b:tp4dp2d")),
    ("train-30b-8", 8, ("30b@4:dp1!", "30b@4:dp8ep8d", "30b@4:tp2dp4ep4d")),
)
"""Name, GPUs and cases of `bench train`. Each starts with a one-GPU case, whose losses are the reference for the others;
30B-A3B is shortened to the layers that one GPU of 80 GB can train."""

LARGE_MICROBATCHES = ("--rows", "24", "--micro", "6")
"""For dense models: with smaller microbatches GPUs wait for launches, and the two processes differ by CPU load."""


VARIANTS = "plain Ray; sync; sync, overlapped; in flight, age 2; in flight, age 4"
"""Variants of whole steps that are compared with plain calls."""


def _steps(gpus: int) -> list[Job]:
    """Returns whole GRPO steps: half of the GPUs per role, and a number of sequences proportional to them.

    A 4B model trains on one GPU of a two-GPU host, which needs 141 GB, and at TP2 on larger hosts.
    """
    half = max(gpus // 2, 1)
    layout = (f"{TRAIN}.data_parallel_size={half}", f"{GENERATION}.data_parallel_size={half}")
    cut = (f"{TRAIN}.tensor_model_parallel_size=2", f"{TRAIN}.data_parallel_size={half // 2}", layout[1])
    whole = ("policy.sequence_packing={enabled: true, train_mb_tokens: 8192, logprob_mb_tokens: 16384}", *layout)
    large = (*_sequences(8 * half), *(cut if half > 1 else whole))
    small = (*_sequences(16 * half), *layout)
    plain = ("--variants", VARIANTS, "--at-rest", "--rounds", "2")
    return [
        _step("compare", "qwen3-0.6b", (*plain, "--steps", "6", *small), gpus=2),
        _step("compare", "qwen3-4b", (*plain, "--steps", "4", *large), gpus=2),
        _step("step", "qwen3-0.6b", ("--keep-weights", "--rounds", "1", *small), gpus=2),
    ]


def _sequences(prompts: int) -> tuple[str, ...]:
    """Returns the overrides for a batch of `prompts` with eight samples each, and one batch per epoch."""
    return (
        f"grpo.num_prompts_per_step={prompts}",
        f"policy.train_global_batch_size={8 * prompts}",
        f"data.task_args.count={prompts}",
    )


def _step(name: str, model: str, words: Sequence[str], gpus: int) -> Job:
    setting = ("--config", "bench/gpu/step.yaml", f"policy.model_name={{models}}/{model}")
    job = _bench("step", *setting, *words, *DEADLINE, gpus=gpus, name=f"{name}-{model}")
    return replace(job, before=_python("dagrl.bench.models", model, "{models}"))


def _faults(gpus: int) -> list[Job]:
    """Returns the jobs that kill workers. On two GPUs an all-reduce needs both, so that one is SFT."""

    def job(name: str, *words: str) -> Job:
        files = ("--json", f"{{out}}/{name}.json", *DEADLINE)
        return Job("faults", name, _python("dagrl.bench.gpu.faults", *files, *words), gpus=2)

    if gpus >= 3:
        return [job("faults", _dp(2))]
    sft = ("algorithm=sft", "sft.max_num_steps=8", _dp(2))
    return [job("faults-sft", "--places", "all_reduce", *sft), job("faults", "--places", "quantum,refit")]


ASYNC = (
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "loss_fn.use_importance_sampling_correction=true",
)
DENSE, MOE = "examples/grpo_gpu.yaml", "bench/gpu/moe.yaml"
RUNS: tuple[tuple[str, str, int, Sequence[str]], ...] = (
    ("sync", DENSE, 2, ()),
    ("async-in-flight", DENSE, 2, ASYNC),
    ("eager", DENSE, 2, ("executor=eager",)),
    ("colocated", DENSE, 1, ()),
    ("colocated-tp2-to-tp2", DENSE, 2, ()),
    ("colocated-pp2-to-dp2", DENSE, 2, ()),
    ("colocated-ep2-to-tp2", MOE, 2, ()),
    ("tp2-to-tp2", DENSE, 4, ()),
    ("pp2-to-dp2", DENSE, 4, ASYNC),
    ("dp2-to-tp2", DENSE, 4, ()),
    ("ep2-to-tp2", MOE, 4, ()),
    ("colocated-tp2pp2-to-tp2dp2", DENSE, 4, ()),
    ("colocated-tp2dp2-to-tp4", DENSE, 4, ()),
    ("colocated-ep4-to-tp4", MOE, 4, ()),
    ("tp2pp2-to-tp2dp2", DENSE, 8, ()),
    ("tp2dp2-to-tp4", DENSE, 8, ASYNC),
    ("ep4-to-tp4", MOE, 8, ()),
)
"""Runs of `dagrl train`, SFT and then GRPO: name, configuration, GPUs and overrides besides the layouts in the name."""

AXES = {"tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "dp": "data_parallel", "ep": "expert_model_parallel"}


def _train(name: str, config: str, words: Sequence[str]) -> tuple[str, ...]:
    return _python("dagrl.cli.main", "train", config, "output_dir={out}/runs", f"name={name}", *_layouts(name), *words)


def _layouts(name: str) -> Iterator[str]:
    """Yields the overrides for a name such as `colocated-tp2pp2-to-tp2dp2`: train layout, then engines."""
    if name.startswith("colocated"):
        yield "policy.generation.colocated.enabled=true"
    train, _, generation = name.removeprefix("colocated-").partition("-to-")
    if generation:
        for axis, size in re.findall(_AXIS, train):
            yield f"{TRAIN}.{AXES[axis]}_size={size}"
            if axis == "ep":
                yield _dp(size)
        for axis, size in re.findall(_AXIS, generation):
            yield f"{GENERATION}.{AXES[axis].replace('_model', '')}_size={size}"


_AXIS = r"([a-z]{2})(\d+)"


def _dp(size: int | str) -> str:
    return f"{TRAIN}.data_parallel_size={size}"
