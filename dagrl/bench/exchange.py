"""Measures how fast colocated training leaves its GPU and comes back, as a share of the link.

    dagrl bench exchange [--model qwen3-0.6b] [--rounds 6] [--json F]

One worker moves weights, optimizer state and gradients to pinned host memory and back, as for generation on the same GPU. In
the same rounds, torch copies 1 GiB between the GPU and pinned memory: that is the link. Gradients are dropped and come back
as zeros; they are not in the bytes. The first round, in which host memory is pinned, is not counted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from dagrl.bench.models import SHAPES, write_model
from dagrl.bench.report import Row, add_outputs, count, print_rows, report_rows
from dagrl.bench.train_inputs import one_gpu_config, single_worker, train_batch
from dagrl.errors import ConfigError
from dagrl.run.colocated import TRAIN_PARTS
from dagrl.workers.megatron import MegatronWorker

GIB = 1 << 30
LENGTH = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--rounds", type=count, default=6, help="counted moves in each direction")
    add_outputs(parser, plot=False)


def run(options: argparse.Namespace) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("found no GPU; the benchmark measures copies between a GPU and the host")
    with tempfile.TemporaryDirectory() as directory:
        report_rows(options, [measure(options, Path(directory))], print_table)


def measure(options: argparse.Namespace, directory: Path) -> list[Row]:
    """Moves the state of one worker away and back, in turn with plain copies."""
    import torch

    config = one_gpu_config(write_model(SHAPES[options.model], directory), LENGTH, {"precision": "bfloat16"})
    with single_worker(config, MegatronWorker) as worker:
        worker.train_step(train_batch(2, LENGTH, vocabulary=150_000), "likelihood")  # the optimizer has all its state then
        state = worker._ready().offloader
        size = state.nbytes("weights") + state.nbytes("optimizer")
        host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "to the host": (lambda: worker.offload(TRAIN_PARTS), lambda: host.copy_(device, non_blocking=True)),
            "to the GPU": (lambda: worker.reload(TRAIN_PARTS), lambda: device.copy_(host, non_blocking=True)),
        }
        rounds = [{way: (timed(move), timed(copy)) for way, (move, copy) in ways.items()} for _ in range(options.rounds + 1)]
    return [as_row(way, options.model, size, [one[way] for one in rounds[1:]]) for way in ways]


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds until the GPU has done what `action` launches."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def as_row(direction: str, model: str, size: int, rounds: list[tuple[float, float]]) -> Row:
    """Returns the row of `size` bytes from the seconds of each move and of the copy of 1 GiB after it: medians over rounds.

    `share`: the rate over the link's in the same direction.
    """
    seconds, link = median(move for move, _ in rounds), GIB / median(copy for _, copy in rounds)
    rate = size / seconds
    return {
        "direction": direction,
        "model": model,
        "gib": round(size / GIB, 2),
        "rounds": len(rounds),
        "seconds": round(seconds, 4),
        "gb_per_s": round(rate / 1e9, 1),
        "link_gb_per_s": round(link / 1e9, 1),
        "share": round(rate / link, 3),
    }


def print_table(rows: Sequence[Row]) -> None:
    names = ("direction", "gib", "seconds", "gb_per_s", "link_gb_per_s", "share")
    cells = ([row[name] for name in names] for row in rows)
    print_rows(("direction", "GiB", "seconds", "GB/s", "link GB/s", "share"), cells, rows[0]["model"])
