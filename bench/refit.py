"""Measures refits of full-size models: how long the weights take from Megatron's modules to vLLM's, and by other methods.

    dagrl bench refit --json F --plot F              all cases that fit this host's GPUs, two sides of equal size
    dagrl bench refit --cases "4B TP2->TP2" --rounds 50
    dagrl bench refit --cases "4B TP1->TP1 colocated"   two processes on one GPU, over CUDA IPC
    dagrl bench refit --trial                        a tiny model on the CPU, to try the benchmark

A row of the JSON file is one method of one case. It has the seconds (median, 90th percentile) of the slowest rank from a
common start until the last byte is in place, the bytes a generation rank holds, the share of the raw bandwidth of NCCL's
point-to-point messages between the same pairs, measured just before (of plain copies if both sides share a GPU), staging
memory, the pause of a generation rank, and the number of wrong parameters.
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

from dagrl.bench.deadline import TIME_IS_UP
from dagrl.bench.refit_cases import CASES, TRIALS, RefitCase, largest_that_fit, trials
from dagrl.bench.refit_report import RefitRow, label, plot, print_table, report
from dagrl.bench.report import command_line
from dagrl.errors import ConfigError, RunError

SPARE_S = 1.5  # for processes to exit before they are killed
OVERTIME_S = 25.0
"""Time after the deadline for a method that takes longer than the earlier ones. It exceeds a channel's deadline, after
which a hanging rank reports itself. With the plot it stays below the time that `dagrl.bench.gpu.run_all` grants a job
after its deadline."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dagrl bench refit`."""
    parser.add_argument("--json", type=Path, help="write the rows to this JSON file, after each")
    parser.add_argument("--plot", type=Path, help="plot the times to this file (png, svg)")
    parser.add_argument(
        "--cases", nargs="*", default=[], help='only cases with these name prefixes, e.g. "4B" "30B EP2->TP2 fp8"'
    )
    parser.add_argument("--rounds", type=int, default=20, help="measured refits per method")
    parser.add_argument("--bucket-bytes", type=int, help="bytes per bucket; default: the value of a run")
    parser.add_argument("--direct-bytes", type=int, help="smallest slice sent without staging")
    parser.add_argument("--no-rivals", action="store_true", help="skip the broadcasts")
    parser.add_argument(
        "--deadline", type=float, default=900.0, metavar="S", help="skip methods that would not finish within S seconds"
    )
    parser.add_argument("--trial", action="store_true", help="measure a tiny model on the CPU")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the requested files. Raises RunError if a method failed or left wrong
    parameters."""
    gpus, memory, kinds = _gpus()
    if not options.trial and not gpus:
        raise ConfigError("found no GPU; use a host with GPUs, or --trial for a tiny model on the CPU")
    cases, left_out = (trials(options.cases), {}) if options.trial else largest_that_fit(gpus, memory, options.cases)
    if not cases and not left_out:
        names = dict.fromkeys(case.name for case in (TRIALS if options.trial else CASES))
        raise ConfigError(f"--cases {' '.join(options.cases)}: no case has this prefix; choose from {', '.join(names)}")
    rows: list[RefitRow] = []

    def keep(row: RefitRow) -> None:
        if "left_out" in row:
            left_out[label(row)] = str(row["left_out"])
        else:
            rows.append(row)
        sys.stderr.write(f"{_line(row)}\n")
        if options.json:
            report(rows, command_line(), left_out).write(options.json, rows="cases")

    deadline = time.monotonic() + options.deadline
    for sizes in sorted({(case.gpus, case.ranks) for case in cases}, reverse=True):
        some = [case for case in cases if (case.gpus, case.ranks) == sizes]
        if time.monotonic() < deadline:
            _measure(some, options, keep, deadline)
        else:
            for case in some:
                keep({"name": case.name, "dtype": case.dtype, "left_out": TIME_IS_UP})
    if options.json:
        report(rows, command_line(), left_out).write(options.json, rows="cases")
    print_table(rows, left_out)
    if options.plot and any("median_s" in row for row in rows):
        plot(options.plot, rows, kinds)
    check(rows)


def check(rows: Sequence[RefitRow]) -> None:
    """Raises RunError with the methods that failed or left wrong parameters."""
    failed = [
        label(row) if "name" in row else str(row["error"]) for row in rows if row.get("error") or row.get("wrong_parameters")
    ]
    if failed:
        raise RunError(f"{len(failed)} methods of the refit benchmark failed, see their rows: {', '.join(failed)}")


def _line(row: RefitRow) -> str:
    if "median_s" in row:
        return f"{label(row)}: {row['median_s'] * 1e3:.2f} ms, {row['gb_per_s']:.1f} GB/s"
    if "left_out" in row:
        return f"{label(row)}: left out, {row['left_out']}"
    return f"{label(row)}: {row.get('note') or row['error']}"


def _gpus() -> tuple[int, int, str]:
    """Returns the number of GPUs, the memory of the smallest in bytes, and their names."""
    import torch

    if not torch.cuda.is_available():
        return 0, 0, ""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = sorted({one.name for one in found})
    return len(found), min(one.total_memory for one in found), f"{len(found)} x {' and '.join(names)}"


def _measure(cases: Sequence[RefitCase], options: argparse.Namespace, keep: Any, deadline: float) -> None:
    """Measures cases of the same number of ranks and GPUs, in processes of their own."""
    from dagrl.bench.refit_rank import PORTS_A_CASE, Settings, run_rank

    size = cases[0].ranks
    control, *ports = _free_ports(1 + PORTS_A_CASE * len(cases))
    settings = Settings(
        cases,
        not options.trial,
        not options.trial,
        options.rounds,
        control,
        ports,
        options.bucket_bytes,
        options.direct_bytes,
        rivals=not (options.no_rivals or options.trial),
        until=deadline,
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [context.Process(target=run_rank, args=(settings, rank, theirs), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        _listen(ours, size, keep, deadline + OVERTIME_S)
    finally:
        last = time.monotonic() + SPARE_S
        for process in ranks:
            process.join(max(0.0, last - time.monotonic()))
            process.kill()
            process.join()


def _listen(connection: Any, size: int, keep: Any, deadline: float) -> None:
    """Passes on rows until every rank has ended."""
    running = size
    while running:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            keep({"error": f"{running} ranks did not finish in time and were killed"})
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
