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
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection

from dagrl.bench.deadline import TIME_IS_UP, BenchDeadline, add_deadline
from dagrl.bench.refit_cases import CASES, TRIALS, RefitCase, largest_that_fit, trials
from dagrl.bench.refit_report import label, plot, print_table
from dagrl.bench.report import Row, add_outputs, count, report_rows
from dagrl.errors import ConfigError, RunError

SPARE_S = 1.5  # for processes to exit before they are killed
OVERTIME_S = 25.0
"""Time after the deadline for a method that takes longer than the earlier ones. It exceeds a channel's deadline, after
which a hanging rank reports itself. With the plot it stays below the time that `dagrl.bench.gpu.run_all` grants a job
after its deadline."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_outputs(parser)
    parser.add_argument(
        "--cases", nargs="*", default=[], help='only cases with these name prefixes, e.g. "4B" "30B EP2->TP2 fp8"'
    )
    parser.add_argument("--rounds", type=count, default=20, help="measured refits per method")
    parser.add_argument("--bucket-bytes", type=int, help="bytes per bucket; default: the value of a run")
    parser.add_argument("--direct-bytes", type=int, help="smallest slice sent without staging")
    parser.add_argument("--no-rivals", action="store_true", help="skip the broadcasts")
    add_deadline(parser, default=900.0)
    parser.add_argument("--trial", action="store_true", help="measure a tiny model on the CPU")


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the requested files. Raises RunError if a method failed or left wrong
    parameters."""
    gpus, memory = _gpus()
    if not options.trial and not gpus:
        raise ConfigError("found no GPU; use a host with GPUs, or --trial for a tiny model on the CPU")
    cases, left_out = (trials(options.cases), {}) if options.trial else largest_that_fit(gpus, memory, options.cases)
    if not cases and not left_out:
        names = dict.fromkeys(case.name for case in (TRIALS if options.trial else CASES))
        raise ConfigError(f"--cases {' '.join(options.cases)}: no case has this prefix; choose from {', '.join(names)}")
    deadline, failed = BenchDeadline(options.deadline), dict[str, str]()
    deadline.left_out |= left_out
    measured = sorted_out(_measure_all(cases, options, deadline), deadline.left_out, failed)
    show = partial(print_table, failed=failed)
    report_rows(options, measured, show, plot, deadline=deadline, failed=failed, key="cases")
    if failed:
        raise RunError(f"{len(failed)} methods of the refit benchmark failed, see their rows: {', '.join(failed)}")


def sorted_out(rows: Iterable[Row], left_out: dict[str, str], failed: dict[str, str]) -> Iterator[list[Row]]:
    """Yields the measured rows so far; adds the others to `left_out` and `failed`, by their labels. A method that left wrong
    parameters has failed too."""
    measured: list[Row] = []
    for row in rows:
        if "left_out" in row:
            left_out[label(row)] = row["left_out"]
        if "error" in row:
            failed[label(row)] = row["error"]
        if row.get("wrong_parameters"):
            failed[label(row)] = f"wrong parameters: {row['wrong_parameters']}"
        measured += [row] if "median_s" in row else []
        sys.stderr.write(f"{_line(row)}\n")
        yield measured


def _line(row: Row) -> str:
    if "median_s" in row:
        return f"{label(row)}: {row['median_s'] * 1e3:.2f} ms, {row['gb_per_s']:.1f} GB/s"
    if "left_out" in row:
        return f"{label(row)}: left out, {row['left_out']}"
    return f"{label(row)}: {row.get('note') or row['error']}"


def _gpus() -> tuple[int, int]:
    """Returns the number of GPUs, and the memory of the smallest in bytes."""
    import torch

    found = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return len(found), min(found, default=0)


def _measure_all(cases: Sequence[RefitCase], options: argparse.Namespace, deadline: BenchDeadline) -> Iterator[Row]:
    """Yields the rows of cases of the same number of ranks and GPUs, then of the next."""
    for sizes in sorted({(case.gpus, case.ranks) for case in cases}, reverse=True):
        some = [case for case in cases if (case.gpus, case.ranks) == sizes]
        if deadline.left() > 0:
            yield from _measure(some, options, time.monotonic() + deadline.left())
        else:
            yield from ({"name": case.name, "dtype": case.dtype, "left_out": TIME_IS_UP} for case in some)


def _measure(cases: Sequence[RefitCase], options: argparse.Namespace, until: float) -> Iterator[Row]:
    """Measures cases of the same number of ranks and GPUs, in processes of their own."""
    from dagrl.bench.refit_rank import PORTS_A_CASE, Settings, run_rank

    size = cases[0].ranks
    control, *ports = _free_ports(1 + PORTS_A_CASE * len(cases))
    settings = Settings(
        cases,
        not options.trial,
        options.rounds,
        control,
        ports,
        options.bucket_bytes,
        options.direct_bytes,
        rivals=not (options.no_rivals or options.trial),
        until=until,
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [context.Process(target=run_rank, args=(settings, rank, theirs), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    theirs.close()
    try:
        yield from _listen(ours, size, until + OVERTIME_S)
    finally:
        last = time.monotonic() + SPARE_S
        for process in ranks:
            process.join(max(0.0, last - time.monotonic()))
            process.kill()
            process.join()


def _listen(connection: Connection, size: int, until: float) -> Iterator[Row]:
    """Passes on rows until every rank has ended."""
    running = size
    while running:
        if not connection.poll(max(0.0, until - time.monotonic())):
            yield {"error": f"{running} ranks did not finish in time and were killed"}
            return
        try:
            row = connection.recv()
        except EOFError:
            yield {"error": f"{running} ranks died"}
            return
        if row is None:
            running -= 1
        else:
            yield row


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
