"""Measures refits of full-size models: how long the weights take from Megatron's modules to vLLM's, and by other methods.

    dagrl bench refit --json F                            all cases that fit this host's GPUs, two sides of equal size
    dagrl bench refit --cases "4B TP2->TP2" --repeats 50
    dagrl bench refit --cases "4B TP1->TP1 colocated"     two processes on one GPU, over CUDA IPC
    dagrl bench refit --trial                             a tiny model on the CPU, to try the benchmark
    dagrl bench refit --architectures --json F            every architecture that vLLM builds, at tiny size

A step of a side is one transfer of the whole model: the seconds of the slowest rank from a common start until the last byte
is in place. After each turn every element of every destination is compared with its expected value. Rows have the bytes that
a generation rank holds (`bytes_into_rank`), the bandwidth of NCCL's point-to-point messages between the same pairs, measured
just before (`raw_gb_per_s`; of plain copies if both sides share a GPU), staging memory, and the pause of a generation rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, cast

from dagrl.bench import harness
from dagrl.bench.harness import Column, Contest, Take, Turn
from dagrl.bench.report import Row
from dagrl.cli.numbers import count, positive
from dagrl.errors import ConfigError, RunError
from dagrl.runtime.store import reserve_port

if TYPE_CHECKING:
    from dagrl.bench.refit_cases import RefitCase

END_S = 1.5  # for processes to exit before they are killed
LIMIT_S = 240.0
"""How long ranks may take to build a case, or for a turn."""

COLUMNS = (
    Column("GB into a rank", "gigabytes", "{:.3f}"),
    Column("GB/s", "gb_per_s", "{:.1f}"),
    Column("of the link", "share_of_raw", "{:.3f}"),
    Column("staging MB", "staging_mb", "{:.0f}"),
    Column("pause ms", "pause_ms", "{:.2f}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    harness.add_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--trial", action="store_true", help="measure a tiny model on the CPU")
    what.add_argument("--architectures", action="store_true", help="refit tiny models of all architectures")
    parser.add_argument(
        "--cases", nargs="*", default=[], help='only cases with these prefixes, e.g. "4B" "30B EP2->TP2 fp8"'
    )
    parser.add_argument("--repeats", type=count, default=10, help="transfers of a turn")
    parser.add_argument("--no-rivals", action="store_true", help="skip the broadcasts and vLLM's own transfers")
    parser.add_argument("--names", nargs="*", help="of --architectures: only these; default: all that vLLM lists")
    parser.add_argument("--seconds", type=positive, default=240, help="of --architectures: deadline of one")


def run(options: argparse.Namespace) -> None:
    if options.architectures:
        from dagrl.bench import refit_architectures

        refit_architectures.run(options)
        return
    cases, left_out = chosen(options)
    with ExitStack() as stack:
        pool = Pool(cases, not options.trial, rivals=not (options.no_rivals or options.trial))
        stack.callback(pool.close)
        contests = [
            Contest(case.label, {case.label: {"gpus": case.gpus}}, partial(methods, pool, case, options)) for case in cases
        ]
        harness.run(options, contests, COLUMNS, finish, left_out)


def chosen(options: argparse.Namespace) -> tuple[list[RefitCase], dict[str, str]]:
    """Returns the cases that fit, those of equal sizes next to each other, and why others do not. Raises ConfigError."""
    from dagrl.bench.refit_cases import CASES, TRIALS, largest_that_fit, trials

    gpus, memory = _gpus()
    if not options.trial and not gpus:
        raise ConfigError("found no GPU; use a host with GPUs, or --trial for a tiny model on the CPU")
    cases, left_out = (trials(options.cases), {}) if options.trial else largest_that_fit(gpus, memory, options.cases)
    if not cases and not left_out:
        names = dict.fromkeys(case.name for case in (TRIALS if options.trial else CASES))
        raise ConfigError(f"--cases {' '.join(options.cases)}: no case has this prefix; choose from {', '.join(names)}")
    return sorted(cases, key=lambda case: (case.gpus, case.ranks), reverse=True), left_out


def _gpus() -> tuple[int, int]:
    """Returns the number of GPUs, and the memory of the smallest in bytes."""
    import torch

    found = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return len(found), min(found, default=0)


@contextmanager
def methods(pool: Pool, case: RefitCase, options: argparse.Namespace) -> Iterator[dict[str, Take]]:
    """Yields the methods of a case, on ranks that hold both sides."""
    names = pool.begin(case)
    yield {name: partial(turn, pool, case, name, options.repeats) for name in names}
    pool.ask("end")


def turn(pool: Pool, case: RefitCase, method: str, repeats: int) -> dict[str, Turn]:
    """Transfers the model some times. Raises RunError if a parameter is wrong afterwards."""
    answers = pool.ask("turn", method, repeats)
    if wrong := [name for answer in answers for name in answer["wrong"]]:
        raise RunError(f"wrong parameters: {len(wrong)}, such as {', '.join(wrong[:4])}")
    seconds = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
    facts = {key: max(answer["facts"].get(key, 0) for answer in answers) for key in answers[0]["facts"]}
    return {case.label: Turn(seconds, facts | {"holders": sorted({answer["holder"] for answer in answers})})}


def finish(rows: list[Row]) -> list[Row]:
    """Adds rates and the share of the link."""
    found = []
    for row in rows:
        rate = row["bytes_into_rank"] / row["median_s"] / 1e9
        more = {"gigabytes": row["bytes_into_rank"] / 1e9, "gb_per_s": rate, "staging_mb": row["staging_bytes"] / 1e6}
        more |= {"share_of_raw": rate / row["raw_gb_per_s"]} if row["raw_gb_per_s"] else {}
        more |= {"pause_ms": row["pause_s"] * 1e3} if row.get("pause_s") else {}
        found.append(row | more)
    return found


class Pool:
    """Processes of the ranks of both sides. They stay for all cases of the same number of ranks and GPUs."""

    def __init__(self, cases: Sequence[RefitCase], on_gpus: bool, rivals: bool) -> None:
        self._cases, self._on_gpus, self._rivals = cases, on_gpus, rivals
        self._sizes: tuple[int, int] | None = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def begin(self, case: RefitCase) -> list[str]:
        """Builds a case on the ranks, which are started if their number changes. Returns its methods."""
        from dagrl.bench.refit_rank import PORTS, run_rank

        if (case.gpus, case.ranks) != self._sizes:
            self.close()
            context, control = multiprocessing.get_context("spawn"), reserve_port()
            for rank in range(case.ranks):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, case.ranks, case.gpus, control, self._on_gpus)
                self._processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
                self._processes[-1].start()
                theirs.close()
                self._pipes.append(ours)
            self._sizes = (case.gpus, case.ranks)
        thorough = case == next(one for one in self._cases if one.kind == case.kind)
        made = replace(case, made=case.sources())
        names: list[str] = self.ask(
            "begin", made, case.destinations(), [reserve_port() for _ in range(PORTS)], thorough, self._rivals
        )[0]
        return names

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """Returns every rank's answer. Raises RunError with the errors of all ranks; without an answer they are killed."""
        if not self._pipes:
            raise RunError("the ranks have ended")
        for pipe in self._pipes:
            pipe.send((command, arguments))
        answers: dict[int, tuple[str, Any]] = {}
        until, gone = time.monotonic() + LIMIT_S, False
        while len(answers) < len(self._pipes) and not gone:
            silent = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            arrived = wait(silent, max(0.0, until - time.monotonic()))
            for pipe in cast("list[Connection]", arrived):
                try:
                    answers[silent[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    answers[silent[pipe]], gone = ("died", None), True
            if any(error for error, _ in answers.values()):
                until = min(until, time.monotonic() + END_S)  # the others may wait for that rank
            gone = gone or not arrived
        errors = [f"rank {rank}: {error}" for rank, (error, _) in sorted(answers.items()) if error]
        if gone:
            self.close()
            errors = errors or [f"ranks did not {command} within {LIMIT_S:.0f} s: {', '.join(map(str, silent.values()))}"]
        if errors:
            raise RunError("\n".join(errors))
        return [answers[rank][1] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()  # ends a rank that listens
        until = time.monotonic() + END_S
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
        self._processes, self._pipes, self._sizes = [], [], None
