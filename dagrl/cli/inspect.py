"""`dagrl inspect CONFIG` shows what a run would compile, without starting actors.

The report has the phase graphs, their buckets and channels, and the refit plan:

    dagrl inspect examples/grpo_quickstart.yaml > phases.mmd       # a Mermaid chart, with the numbers as comments
    dagrl inspect examples/grpo_quickstart.yaml --phase refit
    dagrl inspect examples/grpo_gpu.yaml --memory --gpu-memory 80          # what each role takes of a GPU, predicted
    dagrl inspect examples/grpo_gpu.yaml --time H200                       # the seconds of a step, by phase, predicted
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from dagrl.config import Config, Json
from dagrl.config.checks import check_settings
from dagrl.config.plan import RunPlan
from dagrl.config.settings import generation_dtype, phase_path, sends_adapters
from dagrl.errors import ConfigError
from dagrl.imports import did_you_mean, gc_paused
from dagrl.refit import TIED_HEAD, RefitPlan, plan_refit
from dagrl.run.cluster import gpus_per_worker
from dagrl.run.derive import gpu_memory
from dagrl.run.memory import GIB, check_memory, memory_table, run_memory
from dagrl.run.model import load_tokenizer, model_description, token_count, with_local_models
from dagrl.run.plans import PhasePlan, load_phase, run_plans
from dagrl.run.preflight import check_model, read_data, trace_phases, worker_classes
from dagrl.run.step_time import GPUS, PhaseTime, Rows, generated_rows, run_times
from dagrl.runtime.draw import Drawing, mermaid, size_text
from dagrl.runtime.graph import PhaseGraph
from dagrl.runtime.schedule import SchedulerOptions, channel_bytes

GPUS_PER_HOST = 8  # GPUs of the hosts over which ranks are spread, if they do not fit on one


@dataclass(frozen=True)
class PhaseReport:
    """A phase as a run would compile it: its picture, and its buckets and channels in words."""

    name: str
    drawing: Drawing
    text: str


def inspect_config(config: Config, phase: str | None = None, *, lengths: bool = True) -> str:
    """Returns the report for one phase (its key in `phases`), or for all that the algorithm replays, as a Mermaid chart with
    the numbers as comments. `lengths`: whether the longest sequence is known.

    Raises UserError if layouts or phases are invalid, like preflight.
    """
    plan = RunPlan.of(config)
    check_settings(config, plan, lengths=lengths)
    config, _ = with_local_models(config)
    hf_config = _model(config)
    check_model(config, hf_config)
    reports = phase_reports(config, phase)
    texts = [report.text for report in reports]
    if any(report.name == "refit" for report in reports):
        with gc_paused():
            texts.append(_refit_text(config, hf_config))
    comments = "\n".join(f"%% {line}".rstrip() for line in "\n".join(texts).splitlines())
    return f"{comments}\n{mermaid([report.drawing for report in reports])}"


def inspect_memory(config: Config, gpu_gib: float | None = None) -> str:
    """Returns the memory that each role of a run is predicted to take of a GPU. `gpu_gib`: of GPUs that are not here.

    Raises ConfigError if what a GPU must hold at once does not fit.
    """
    if gpu_gib is not None:
        config = _with_gpus(config)
    if not gpus_per_worker(config.cluster):
        raise ConfigError("--memory: the run has no GPUs; add --gpu-memory with the GiB of those that it will have")
    gpu = gpu_memory() if gpu_gib is None else max(1, int(gpu_gib * GIB))
    inputs, limit = read_data(config, gpu)[0], gpu or math.inf
    plan = RunPlan.of(inputs.config)
    roles = run_memory(inputs.config, plan, inputs.hf_config, limit)
    share = gpus_per_worker(config.cluster)
    check_memory(plan, roles, limit, share)
    return memory_table(plan, roles, limit, share)


def step_times(config: Config, gpu: str, mean: float | None = None) -> tuple[Config, list[PhaseTime]]:
    """Returns the run's configuration on GPUs of this name, and the predicted seconds of each phase of a step.

    `mean`: tokens of a completion. Raises ConfigError for a GPU whose rates are not known, or whose memory is too small.
    """
    if gpu not in GPUS:
        raise ConfigError(f"--time {gpu}: its rates are not known; expected: {', '.join(GPUS)}")
    rates = GPUS[gpu]
    inputs = read_data(_with_gpus(config), int(rates.capacity))[0]
    config, plan = inputs.config, RunPlan.of(inputs.config)
    if plan.generates:
        rows = generated_rows(config, [len(prompt) for prompt in inputs.prompts], mean)
    else:
        pairs = [row for pair in inputs.preferences for row in (pair.chosen, pair.rejected)]
        data = pairs or inputs.demonstrations
        count = config.policy.train_global_batch_size * (2 if pairs else 1)
        rows = Rows([len(row) for row in data], float(sum(row.loss_mask.sum() for row in data))).take(count)
    memory = run_memory(config, plan, inputs.hf_config, rates.capacity)
    check_memory(plan, memory, rates.capacity, gpus_per_worker(config.cluster))
    return config, run_times(config, plan, inputs.hf_config, rates, rows, memory)


def _with_gpus(config: Config) -> Config:
    """Returns the configuration with a GPU, if the run has none here."""
    return config if gpus_per_worker(config.cluster) else config.with_keys({"cluster.num_gpus": 1})


def phase_reports(config: Config, only: str | None = None) -> list[PhaseReport]:
    """Returns the phases that the run replays, or only `phases.<only>`. Raises ConfigError for an unknown name."""
    run = RunPlan.of(config)
    graphs, plans = trace_phases(config, run, worker_classes(config, run)), run_plans(config, run)
    names = [plan.name for plan in plans]
    if only is not None and only not in names:
        near = did_you_mean(difflib.get_close_matches(only, names))
        raise ConfigError(f"--phase {only}: algorithm {config.algorithm!r} replays {', '.join(names)}{near}")
    return [_report(config, run, plan, graphs[plan.name]) for plan in plans if only in (None, plan.name)]


def plan_config_refit(config: Config, hf_config: Mapping[str, Json] | None = None) -> RefitPlan | None:
    """Returns the refit plan of a run, or None if a worker class has no `describe`.

    `hf_config` is the model's `config.json`. None: read it from where the configuration says.
    """
    plan = RunPlan.of(config)
    workers, groups = worker_classes(config, plan), plan.layouts
    described = {role: getattr(workers[role], "describe", None) for role in ("train", "generation")}
    if None in described.values():
        return None
    hf_config = _model(config) if hf_config is None else hf_config
    sources, destinations = (
        [describe(config, hf_config, groups[role], rank) for rank in range(groups[role].world_size)]
        for role, describe in described.items()
        if describe is not None
    )
    shared = plan.colocated  # and then on one host
    return plan_refit(
        sources,
        destinations,
        dtype=config.policy.precision,
        target_dtype=generation_dtype(config),
        aliases=TIED_HEAD if hf_config.get("tie_word_embeddings") else None,
        hosts=None if shared else _hosts(len(sources), len(destinations)),
        mailboxes=shared,
    )


def _model(config: Config) -> Mapping[str, Json]:
    return model_description(config.policy, token_count(load_tokenizer(config.policy)))


def _hosts(train: int, generation: int) -> list[int] | None:
    """Returns the host of each channel rank if ranks fill hosts in order, or None if all fit on one host.

    Train and generation workers share a host only if all of them fit on one.
    """
    if train + generation <= GPUS_PER_HOST:
        return None
    first = -(-train // GPUS_PER_HOST)
    return [rank // GPUS_PER_HOST for rank in range(train)] + [first + rank // GPUS_PER_HOST for rank in range(generation)]


def _report(config: Config, run: RunPlan, plan: PhasePlan, graph: PhaseGraph) -> PhaseReport:
    input_bytes = channel_bytes(load_phase(config, plan.name), plan.buckets)
    result_bytes = plan.result_bytes or SchedulerOptions.result_bytes
    buffers: dict[int | None, int] = {None: input_bytes}
    buffers |= dict.fromkeys(range(len(graph.nodes)), result_bytes)
    groups = {role: layout for role, layout in run.layouts.items() if role in graph.widths}
    drawing = Drawing(graph, groups, buffers)
    workers = ", ".join(f"{width} {role}" for role, width in graph.widths.items())
    lines = [
        f"phase {drawing.title} ({phase_path(config, plan.name)})",
        f"  workers of a graph: {workers}; nodes: {len(graph.nodes)}",
    ]
    if plan.buckets:
        lines.append(f"  buckets of a shard (sequences x tokens): {', '.join(map(str, plan.buckets))}")
    lines.append(f"  channels: {size_text(input_bytes)} for the input, {size_text(result_bytes)} for a result")
    return PhaseReport(plan.name, drawing, "\n".join(lines))


def _refit_text(config: Config, hf_config: Mapping[str, Json]) -> str:
    if sends_adapters(config):
        return "no refit plan: refits of adapters are planned when the engine runs"
    plan = plan_config_refit(config, hf_config)
    if plan is None:
        return "no refit plan: a worker class has no static describe(config, hf_config, layout, rank)"
    train = RunPlan.of(config).layouts["train"].world_size
    return f"{plan.summary()}\n  the first {train} ranks are train workers, the others generation workers"
