"""Refits of models of real size: how long the weights take from Megatron's modules to vLLM's, and by other ways.

    dagrl bench refit --json F --plot F              all cases that fit the GPUs of this host, two sides of equal size
    dagrl bench refit --cases "4B TP2->TP2" --rounds 50
    dagrl bench refit --trial                        a tiny model in processes on the CPU, to try the benchmark itself

A row of the JSON file is one way of one case: seconds (median, 90th percentile) of the slowest rank from a common start
until the last byte is in place, bytes that a generation rank holds, the share of the raw bandwidth of NCCL's point-to-point
messages measured just before between the same pairs, staging memory, and how many parameters were not what they must be.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.refit_cases import CASES, TRIALS, Case, largest_that_fit, trials
from bench.refit_report import Row, plot, print_table, write
from bench.report import command_line
from dagrl.errors import ConfigError, RunError

SPARE_S = 1.5  # between the end of a rank and its death
LAST_WAY = 6  # deadlines of a channel that the way under way at the end may take


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dagrl bench refit`."""
    parser.add_argument("--json", type=Path, help="write the rows to this file, as they come")
    parser.add_argument("--plot", type=Path, help="draw the times to this file (png, svg)")
    parser.add_argument(
        "--cases", nargs="*", default=[], help='only cases whose names begin so, e.g. "4B" "30B EP2->TP2 fp8"'
    )
    parser.add_argument("--rounds", type=int, default=20, help="measured refits of each way")
    parser.add_argument("--bucket-bytes", type=int, help="of a message; by default what a run would choose")
    parser.add_argument("--tune", action="store_true", help="first try ways of overlapping, and go on with the best")
    parser.add_argument("--described", action="store_true", help="tensors of the described shapes instead of real modules")
    parser.add_argument("--no-rivals", action="store_true", help="without broadcasts")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds after which no other way is begun")
    parser.add_argument("--trial", action="store_true", help="a tiny model on the CPU, to try the benchmark itself")


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, write what was asked for; RunError when a way failed or gave wrong parameters."""
    gpus, memory, kinds = _gpus()
    if not options.trial and gpus < 2:
        raise ConfigError(f"a refit needs a GPU on each side, and {gpus} are here; --trial runs a tiny model without any")
    cases, left_out = (trials(options.cases), {}) if options.trial else largest_that_fit(gpus, memory, options.cases)
    if not cases and not left_out:
        names = dict.fromkeys(case.name for case in (TRIALS if options.trial else CASES))
        raise ConfigError(f"--cases {' '.join(options.cases)}: no case begins so; there are {', '.join(names)}")
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        sys.stderr.write(f"{_line(row)}\n")
        if options.json:
            write(options.json, rows, command_line(), left_out)

    deadline = time.monotonic() + options.deadline
    for count in sorted({case.gpus for case in cases}, reverse=True):
        _measure([case for case in cases if case.gpus == count], options, keep, deadline)
    print_table(rows, left_out)
    if options.plot and any("median_s" in row for row in rows):
        plot(options.plot, rows, kinds)
    check(rows)


def check(rows: Sequence[Row]) -> None:
    """Raise RunError naming the ways that failed, or whose destinations hold what they must not."""
    failed = [
        " ".join(str(row[key]) for key in ("name", "dtype", "method") if key in row) or str(row["error"])
        for row in rows
        if row.get("error") or row.get("wrong_parameters")
    ]
    if failed:
        raise RunError(f"{len(failed)} ways of the refit benchmark failed, see their rows: {', '.join(failed)}")


def _line(row: Row) -> str:
    what = f"{row.get('name', '')} {row.get('dtype', '')}"
    if "median_s" not in row:
        return f"{what}: {row.get('note') or row.get('error')}"
    return f"{what} {row['method']}: {row['median_s'] * 1e3:.2f} ms, {row['gb_per_s']:.1f} GB/s"


def _gpus() -> tuple[int, int, str]:
    """How many GPUs, the memory of the smallest in bytes, and their names."""
    import torch

    if not torch.cuda.is_available():
        return 0, 0, ""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = sorted({one.name for one in found})
    return len(found), min(one.total_memory for one in found), f"{len(found)} x {' and '.join(names)}"


def _measure(cases: Sequence[Case], options: argparse.Namespace, keep: Any, deadline: float) -> None:
    """Some cases with as many ranks, in processes of their own."""
    from bench.refit_rank import PORTS_A_CASE, Settings, run_rank

    size = cases[0].gpus
    control, *ports = _free_ports(1 + PORTS_A_CASE * len(cases))
    settings = Settings(
        cases,
        "gloo" if options.trial else "nccl",
        not (options.described or options.trial),
        options.rounds,
        control,
        ports,
        options.bucket_bytes,
        rivals=not (options.no_rivals or options.trial),
        tune=options.tune,
        until=deadline,
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [context.Process(target=run_rank, args=(settings, rank, theirs), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        _listen(ours, size, keep, deadline + LAST_WAY * settings.timeout_s)
    finally:
        for process in ranks:
            process.join(SPARE_S)
            process.kill()
            process.join()


def _listen(connection: Any, size: int, keep: Any, deadline: float) -> None:
    """Rows, until every rank has ended."""
    running = size
    while running:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            keep({"error": f"{running} ranks did not end in time and were stopped"})
            return
        try:
            row = connection.recv()
        except EOFError:
            keep({"error": f"{running} ranks died"})
            return
        if row is None:
            running -= 1
        else:
            keep(row)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
