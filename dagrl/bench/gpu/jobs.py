"""The jobs of `run_all`: GPU tests, benchmarks and training runs, with the GPUs and cores that each needs."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dagrl.bench.harness import ROOT
from dagrl.bench.step import KNOWN

TRAIN, GENERATION = "policy.megatron_cfg", "policy.generation.vllm_cfg"
TESTS_FOR_TWO = ("channel_nccl", "end_to_end", "faults", "megatron_nccl", "pipeline_nccl", "vllm_tp")
"""Files of `tests/gpu` whose tests all need two GPUs."""


@dataclass(frozen=True)
class Job:
    """One command. In its words `{out}` stands for the directory of results, and `{seconds}` for the time to measure."""

    part: str
    name: str
    command: tuple[str, ...]
    gpus: int = 1
    cores: int = 1


def jobs(gpus: int) -> list[Job]:
    """Returns all jobs in order; those whose layout depends on the host are for `gpus` GPUs."""
    names = sorted(path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    tests = [
        Job(
            "tests",
            f"tests-{name}",
            _python("pytest", "-m", "gpu", "-q", "-rA", f"tests/gpu/test_{name}.py"),
            1 + (name in TESTS_FOR_TWO),
        )
        for name in names
    ]
    benches = [_bench(name, words, least, cores) for name, words, least, cores in BENCHES]
    runs = [Job("runs", f"run-{name}", _train(name, config, words), least) for name, config, least, words in RUNS]
    return [*tests, *benches, *_steps(max(gpus, 2)), *runs]


def _python(module: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *words)


def _bench(name: str, words: Sequence[str], gpus: int, cores: int = 1) -> Job:
    bench = name.partition("-")[0]
    files = ("--deadline", "{seconds}", "--json", f"{{out}}/{name}.json")
    return Job(bench, name, _python("dagrl.cli.main", "bench", bench, *words, *files), gpus, cores)


_DENSE = ("--rows", "24", "--micro", "6")
"""For dense models: with smaller microbatches GPUs wait for launches, and the two sides differ by CPU load."""

SHARDED, FSDP = f"{TRAIN}.use_distributed_optimizer=true", "policy.backend=fsdp"
RECOMPUTED = f"{FSDP} policy.fsdp_cfg.activation_checkpointing=selective"
ONCE = ("--sides", "dagrl", "--rounds", "1")
LONG = (*ONCE, "--rows", "1", "--micro", "1", "--steps", "1", "--length")
_ON_FOUR = (f"tp2dp2 {SHARDED}", f"dp4 {FSDP}", f"dp2tp2 {FSDP}", f"cp4 {FSDP}")
_ON_EIGHT = (f"dp8ep8 {SHARDED}", f"tp2dp4ep4 {SHARDED}", f"dp8ep8 {FSDP}")
_FSDP_ON_EIGHT = ("policy.fsdp_cfg.data_parallel_size=8", f"{GENERATION}.data_parallel_size=8")
BENCHES: tuple[tuple[str, tuple[str, ...], int, int], ...] = (
    ("overhead", (), 0, 4),
    ("overhead-32", ("--workers", "8,32", "--payloads", "100", "--replay-workers", "32", "--sides", "dagrl"), 0, 36),
    ("overhead-96", ("--workers", "8,64,96", "--payloads", "100", "--replay-workers", "64", "--sides", "dagrl"), 0, 100),
    ("refit", (), 1, 1),
    ("train-0.6b", ("--cases", "0.6b:dp1", *_DENSE), 1, 1),
    ("train-0.6b-2", ("--cases", "0.6b:dp1", "0.6b:tp2", "0.6b:cp2", f"0.6b:dp2 {SHARDED}", *_DENSE), 2, 1),
    ("train-4b-2", ("--cases", "4b:dp1", "4b:tp2", *_DENSE), 2, 1),
    ("train-4b-fsdp-2", ("--cases", "4b:tp2", f"4b:dp2 {FSDP}", f"4b:tp2 {FSDP}", *ONCE, *_DENSE), 2, 1),
    ("train-30b-2", ("--cases", "30b@4:dp1", f"30b@4:dp2ep2 {SHARDED}"), 2, 1),
    ("train-4b-128k-2", ("--cases", f"4b:cp2 {RECOMPUTED}", *LONG, "131072"), 2, 1),
    ("train-4b-4", ("--cases", "4b:dp1", "4b:tp2pp2", "4b:tp4", *_DENSE), 4, 1),
    ("train-4b-fsdp-4", ("--cases", *(f"4b:{layout}" for layout in _ON_FOUR), *ONCE, *_DENSE), 4, 1),
    ("train-8b-fsdp-4", ("--cases", *(f"8b:{layout}" for layout in _ON_FOUR), *ONCE, "--rows", "64"), 4, 1),
    ("train-8b-128k-4", ("--cases", f"8b:cp4 {RECOMPUTED}", *LONG, "131072"), 4, 1),
    ("train-30b-4", ("--cases", "30b@4:dp1", f"30b@4:dp4ep4 {SHARDED}", f"30b@4:dp4ep4 {FSDP}"), 4, 1),
    ("train-4b-8", ("--cases", "4b:dp1", f"4b:tp2pp2dp2 {SHARDED}", f"4b:tp4dp2 {SHARDED}", *_DENSE), 8, 1),
    ("train-30b-8", ("--cases", "30b@4:dp1", *(f"30b@4:{layout}" for layout in _ON_EIGHT), "--rounds", "1"), 8, 1),
    ("train-30b-48-8", ("--cases", *(f"30b:{layout}" for layout in _ON_EIGHT[::2]), *ONCE, "--rows", "64"), 8, 1),
    ("peers-grpo", ("--cases", "grpo 0.6b 128", "grpo 0.6b 512"), 1, 1),
    ("peers-sft", ("--cases", "sft 0.6b 16"), 1, 1),
    ("peers-4b", ("--cases", "grpo 4b 512", "sft 4b 16", "--steps", "2"), 1, 1),
    ("peers-images", ("--cases", "grpo vl-2b 128", "--completion", "128"), 1, 1),
    ("peers-vl-8b-8", ("--cases", "grpo vl-8b 256", "--peers", "--completion", "128", "--keys", *_FSDP_ON_EIGHT), 8, 1),
    ("generate", (), 1, 1),
    ("generate-fp8", ("--cases", "4b 256", "--sides", "dagrl", "dagrl-fp8"), 1, 1),
)
"""Name, which begins with that of the benchmark; options, GPUs and cores. The first case of a model has one GPU, and its
losses are the truth of the others; 30B-A3B is shortened to the layers that one GPU of 80 GB can train."""


def _steps(gpus: int) -> list[Job]:
    """Returns whole GRPO steps: half of the GPUs per role, or all for both, and a number of sequences proportional to them.

    `step-8k` has 512 completions of up to 8,192 tokens: colocated, and in flight with a quarter of the GPUs for training.
    """
    half, quarter = max(gpus // 2, 1), max(gpus // 4, 1)
    colocated = "colocated: policy.generation.colocated.enabled=true policy.reference_weights=host " + _sizes(gpus, gpus)
    fewer = f"in flight, {quarter} of {gpus} train: {KNOWN['in flight, age 2']} {_sizes(quarter, gpus - quarter)}"
    words = ("--config", "dagrl/bench/gpu/step.yaml", *_sizes(half, half).split(), *_batch(16 * half))
    lengths = "policy.max_total_sequence_length=8320 policy.generation.max_new_tokens=8192".split()
    memory = f"{GENERATION}.kv_cache_memory_bytes=51539607552"
    long = (*_batch(64), *lengths, "policy.generation.forced_lengths.median=1024", memory, "--rounds", "1", "--steps")
    return [
        _bench("step", (*words, "--sides", "sync", colocated, "in flight, age 2", "in flight, age 4"), 2),
        _bench("step-8k", (*words, *long, "2", "--sides", colocated, fewer), 4),
        _bench("step-8k-halves", (*words, *long, "1", "--sides", "sync", "in flight, age 2"), 4),
    ]


def _sizes(train: int, generation: int) -> str:
    return f"{TRAIN}.data_parallel_size={train} {GENERATION}.data_parallel_size={generation}"


def _batch(prompts: int) -> list[str]:
    sizes = f"grpo.num_prompts_per_step={prompts} policy.train_global_batch_size={8 * prompts}"
    return [*sizes.split(), f"data.task_args.count={prompts}"]


ASYNC = (
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "loss_fn.use_importance_sampling_correction=true",
)
DENSE, MOE = "dagrl/examples/grpo_gpu.yaml", "dagrl/bench/gpu/moe.yaml"
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
    ("colocated-ep4-to-tp4", MOE, 4, ("policy.router_replay=true",)),
    ("fsdp-dp2-to-tp2", DENSE, 4, ()),
    ("colocated-fsdp-dp4-to-tp4", DENSE, 4, ()),
    ("tp2pp2-to-tp2dp2", DENSE, 8, ()),
    ("tp2dp2-to-tp4", DENSE, 8, ASYNC),
    ("ep4-to-tp4", MOE, 8, ("policy.router_replay=true",)),
    ("fsdp-dp4-to-tp4", DENSE, 8, ()),
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
        yield from [FSDP] * train.startswith("fsdp")
        for axis, size in re.findall(r"([a-z]{2})(\d+)", train):
            yield f"policy.fsdp_cfg.data_parallel_size={size}" if "fsdp" in train else f"{TRAIN}.{AXES[axis]}_size={size}"
            if axis == "ep":
                yield f"{TRAIN}.data_parallel_size={size}"
        for axis, size in re.findall(r"([a-z]{2})(\d+)", generation):
            yield f"{GENERATION}.{AXES[axis].replace('_model', '')}_size={size}"
