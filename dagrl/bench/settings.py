"""Compares settings of one train worker: time of each part of a step, memory, and equal losses.

    dagrl bench settings packing --median 80 [--model tiny|qwen3-0.6b|qwen3-4b] [--rows N] [--length N] [--json F]
    dagrl bench settings prefixes --group 8 --prompt 128 --length 384
    dagrl bench settings offload --model qwen3-0.6b --rows 16 --length 2048
    dagrl bench settings reference --model qwen3-0.6b --rows 16

One worker in this process takes the same steps under each setting, in turn: preparation, log-probabilities, preparation for
training, and an optimizer step.

- `packing`: rows padded to the longest of the batch, `policy.dynamic_batching` and `policy.sequence_packing`, with the same
  token budget per microbatch, `--micro` rows of `--length`. With `--median`, lengths are log-normal, cut at `--length`.
- `prefixes`: packed rows of whole sequences, and rows that hold a prompt of `--prompt` tokens once for its `--group`
  completions, which fill `--length`.
- `offload`: the optimizer's state stays (`off`), leaves during log-probabilities as with
  `policy.offload_optimizer_for_logprob` (`on`), or is copied there and back tensor by tensor (`blocking`). `fits` tells
  whether log-probabilities run with half of the state's memory less than `off` needs.
- `reference`: `policy.reference_weights` on the `host` or the `device`; steps include the reference's log-probabilities.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dagrl.bench.models import SHAPES, ModelShape, write_model
from dagrl.bench.report import Row, add_outputs, count, print_rows, report_rows
from dagrl.bench.train_inputs import one_gpu_config, single_worker, train_batch
from dagrl.runtime.shapes import Batch
from dagrl.workers.megatron import MegatronWorker

if TYPE_CHECKING:
    from torch import Tensor

GIB = 1 << 30
VOCABULARY = 4096
SIGMA = 1.0
"""Standard deviation of the logarithm of log-normal lengths."""

_WIDTHS = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY = ModelShape("tiny", {**SHAPES["qwen3-0.6b"].config, **_WIDTHS, "vocab_size": VOCABULARY, "num_hidden_layers": 4})
MODELS: Mapping[str, ModelShape] = {"tiny": TINY, **SHAPES}


@dataclass(frozen=True)
class Setting:
    """Keys of `policy`, and how the optimizer's state leaves the device."""

    name: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    offload: Literal["no", "overlapped", "blocking"] = "no"


COMPARISONS: Mapping[str, Sequence[Setting]] = {
    "packing": (
        Setting("padded"),
        Setting("dynamic", {"dynamic_batching": {"enabled": True}}),
        Setting("packed", {"sequence_packing": {"enabled": True}}),
    ),
    "prefixes": tuple(
        Setting(name, {"sequence_packing": {"enabled": True, "shared_prefix": shared}})
        for name, shared in {"apart": False, "shared": True}.items()
    ),
    "offload": (Setting("off"), Setting("on", offload="overlapped"), Setting("blocking", offload="blocking")),
    "reference": tuple(Setting(where, {"reference_weights": where}) for where in ("host", "device")),
}


@dataclass(frozen=True)
class Step:
    """One step: seconds of each part, the share of padding in the model's input, and GPU memory."""

    seconds: Mapping[str, float]
    padding_share: float
    held_gib: float
    logprobs_peak_gib: float
    peak_gib: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--rows", type=count, default=32, help="sequences per step")
    parser.add_argument("--length", type=count, default=512, help="tokens of the longest sequence")
    add_outputs(parser, plot=False)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--median", type=float, help="median of log-normal lengths; default: all rows are full")
    parser.add_argument("--group", type=count, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=count, default=128, help="tokens of a prompt")
    parser.add_argument("--micro", type=count, default=4, help="padded sequences per microbatch")
    parser.add_argument("--rounds", type=count, default=4, help="counted steps per setting and turn")
    parser.add_argument("--turns", type=count, default=2, help="turns of each setting")


def run(options: argparse.Namespace) -> None:
    import torch

    options.precision = options.precision or ("bfloat16" if torch.cuda.is_available() else "float32")
    with tempfile.TemporaryDirectory() as directory:
        report_rows(options, [measure(options, Path(directory))], print_table)


def measure(options: argparse.Namespace, directory: Path) -> list[Row]:
    """Measures all settings in every turn, on one worker. The first step of a turn starts with another setting's memory."""
    import torch

    gpu, settings = torch.cuda.is_available(), COMPARISONS[options.comparison]
    model = write_model(MODELS[options.model], directory, options.precision)
    batches = {"train_micro_batch_size": options.micro, "logprob_batch_size": options.micro}
    shared = {"precision": options.precision, **batches}
    configs = {one.name: one_gpu_config(model, options.length, {**shared, **one.policy}) for one in settings}
    batch = make_batch(options)
    steps: dict[str, list[Step]] = {one.name: [] for one in settings}
    losses, reference = {}, options.comparison == "reference"
    with single_worker(configs[settings[0].name], MegatronWorker) as worker:
        for one in settings:
            worker.config = configs[one.name]
            losses[one.name] = worker.evaluate(batch, "likelihood").flat()["loss"]
        assert np.ptp(list(losses.values())) < (1e-2 if options.precision == "bfloat16" else 1e-5), losses
        for _ in range(options.turns):
            for one in settings:
                worker.config = configs[one.name]
                if reference:
                    snapshot_reference(worker, batch)
                steps[one.name] += [one_step(worker, batch, one, reference) for _ in range(options.rounds + 1)][1:]
        fits = what_fits(worker, batch, steps["off"]) if gpu and options.comparison == "offload" else {}
    return [as_row(options, batch, one.name, steps, losses[one.name], fits.get(one.name)) for one in settings]


def make_batch(options: argparse.Namespace) -> Batch:
    """Returns the batch that the options describe."""
    if options.median:
        return long_tailed_batch(options)
    batch = train_batch(options.rows, options.length, VOCABULARY)
    if options.comparison != "prefixes":
        return batch
    first = np.arange(options.rows) // options.group * options.group
    inside = np.arange(options.length) < options.prompt
    mask = batch["loss_mask"] * ~inside
    batch = batch.with_fields(tokens=np.where(inside, batch["tokens"][first], batch["tokens"]), loss_mask=mask)
    return batch.with_scalars(global_valid_tokens=float(mask.sum()))


def long_tailed_batch(options: argparse.Namespace) -> Batch:
    """Returns random tokens; the first quarter of each sequence is its prompt, without loss."""
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(options.median), SIGMA, options.rows).clip(4, options.length).astype(np.int64)
    positions = np.arange(lengths.max())[None, :]  # the batch's smallest bucket
    inside = positions < lengths[:, None]
    mask = (inside & (positions >= np.maximum(1, lengths // 4)[:, None])).astype(np.float32)
    fields = {"tokens": generator.integers(0, VOCABULARY, inside.shape) * inside, "lengths": lengths, "loss_mask": mask}
    return Batch(fields, {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(options.rows)})


def snapshot_reference(worker: MegatronWorker, batch: Batch) -> None:
    """Makes the current weights the reference's, which then has the policy's log-probabilities."""
    worker.snapshot_reference()
    first, second = (worker.logprobs(rows_of(batch), model) for model in ("policy", "reference"))
    assert first is not None and second is not None
    np.testing.assert_array_equal(first["logprobs"], second["logprobs"])


def one_step(worker: MegatronWorker, batch: Batch, setting: Setting, reference: bool) -> Step:
    """Takes a step and measures it; a worker's phases synchronize with the GPU themselves."""
    import torch

    before, after = preparations(worker, setting)
    rows, seconds = rows_of(batch), dict[str, float]()
    held = used_gib("current")
    seconds["logprob_inference_prep"], _ = timed(before)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds["logprobs"], _ = timed(lambda: worker.logprobs(rows))
    if reference:
        seconds["reference_logprobs"], _ = timed(lambda: worker.logprobs(rows, "reference"))
    logprobs_peak = used_gib("peak")
    seconds["training_prep"], _ = timed(after)
    seconds["train"], metrics = timed(lambda: worker.train_step(batch, "likelihood"))
    seconds["step"] = sum(seconds.values())
    return Step(seconds, metrics.flat()["microbatch_padding_share"], held, logprobs_peak, used_gib("peak"))


def preparations(worker: MegatronWorker, setting: Setting) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns the functions that run before and after the log-probabilities."""
    if setting.offload == "no":
        return (lambda: None), (lambda: None)
    if setting.offload == "overlapped":
        return (lambda: worker.prepare_for_logprobs(0)), (lambda: worker.prepare_for_training(0))
    copies: list[Tensor] = []
    tensors = worker._ready().optimizer_tensors()

    def leave() -> None:
        for tensor in tensors:
            copies.append(tensor.to("cpu", copy=True))
            tensor.untyped_storage().resize_(0)

    def come_back() -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.copy_(copy)

    return leave, come_back


def what_fits(worker: MegatronWorker, batch: Batch, off: Sequence[Step]) -> dict[str, bool]:
    """Returns in which settings log-probabilities run with half of the optimizer state's memory less than `off` needs."""
    needed = median(step.logprobs_peak_gib for step in off) * GIB
    limit = int(needed) - worker._ready().offloader.nbytes("optimizer") // 2
    return {one.name: runs_within(worker, batch, one, limit) for one in COMPARISONS["offload"]}


def runs_within(worker: MegatronWorker, batch: Batch, setting: Setting, limit: int) -> bool:
    """Returns whether log-probabilities run, after the setting's preparation, within `limit` bytes of GPU memory."""
    import torch

    before, after = preparations(worker, setting)
    before()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        worker.logprobs(rows_of(batch))
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        after()
        worker.train_step(batch, "likelihood")


def rows_of(batch: Batch) -> Batch:
    """Returns the fields of a batch that log-probabilities need."""
    return Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds until `action` returns, and its result."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def used_gib(which: Literal["current", "peak"]) -> float:
    """Returns the used GPU memory, until the last kernel or copy that uses it has finished; 0 without a GPU."""
    import torch

    return float(torch.cuda.memory_stats()[f"active_bytes.all.{which}"]) / GIB if torch.cuda.is_available() else 0.0


def as_row(
    options: argparse.Namespace, batch: Batch, name: str, steps: Mapping[str, list[Step]], loss: float, fits: bool | None
) -> Row:
    """Returns one row from a setting's steps and those of the first setting.

    Medians over rounds, by part of a step, in milliseconds; spreads are interquartile ranges. `times` is the first setting's
    time over this one's. GPU memory is in GiB, 0 on a CPU: `held_gib` before a step, `logprobs_peak_gib` and `step_peak_gib`
    at most, with memory that kernels or copies may still use.
    """
    mine, first = steps[name], next(iter(steps.values()))
    seconds = {part: [step.seconds[part] for step in mine] for part in mine[0].seconds}
    before = {part: median(step.seconds[part] for step in first) for part in seconds}
    return {
        "comparison": options.comparison,
        "setting": name,
        "model": options.model,
        "precision": options.precision,
        "sequences": options.rows,
        "tokens": int(batch["lengths"].sum()),
        "longest": int(batch["lengths"].max()),
        "rounds": len(mine),
        "ms": {part: round(median(taken) * 1e3, 2) for part, taken in seconds.items()},
        "spread_ms": {part: round(float(np.ptp(np.percentile(one, [25, 75]))) * 1e3, 2) for part, one in seconds.items()},
        "times": {part: round(before[part] / median(taken), 3) for part, taken in seconds.items()},
        "padding_share": round(median(step.padding_share for step in mine), 4),
        "held_gib": round(max(step.held_gib for step in mine), 3),
        "logprobs_peak_gib": round(max(step.logprobs_peak_gib for step in mine), 3),
        "step_peak_gib": round(max(step.peak_gib for step in mine), 3),
        "loss": loss,
        "fits": fits,
    }


def print_table(rows: Sequence[Row]) -> None:
    """Prints the rows: milliseconds with spreads, and times the first row's speed."""
    first, lines = rows[0], []
    for row in rows:
        parts = [f"{row['ms'][part]} ({row['spread_ms'][part]}) {row['times'][part]:.2f}x" for part in row["ms"]]
        memory = f"{row['held_gib']} {row['logprobs_peak_gib']} {row['step_peak_gib']}"
        lines.append((row["setting"], f"{row['padding_share']:.1%}", *parts, memory, row["fits"], f"{row['loss']:.5f}"))
    title = "{model}: {sequences} sequences, {tokens} tokens, the longest {longest}".format(**first)
    print_rows((first["comparison"], "padding", *first["ms"], "GiB held, peaks", "fits", "loss"), lines, title)
