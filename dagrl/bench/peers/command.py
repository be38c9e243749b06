"""The command `dagrl bench peers`: starts both sides of each case, lets them take turns, and reports paired ratios."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import TypeVar

from dagrl.bench.deadline import TIME_IS_UP, BenchDeadline, add_deadline
from dagrl.bench.models import write_with_tokenizer
from dagrl.bench.peers.case import PeerCase, SideOrder, parse_case
from dagrl.bench.report import BenchReport, Row, add_outputs, commit, count, print_rows, report_rows
from dagrl.bench.turns import Side
from dagrl.errors import ConfigError, RunError


@dataclass(frozen=True)
class Peer:
    """What dagrl is compared with: its module by kind of case, and the package whose version is reported."""

    name: str
    package: str
    modules: Mapping[str, str]
    variant: str = ""

    def label(self) -> str:
        """The peer's name with its version, if it is not dagrl itself."""
        if self.package == "dagrl":
            return self.name
        installed = metadata.packages_distributions()[self.package][0]  # vLLM for CPUs is another distribution
        return f"{self.name}-{metadata.version(installed)}"


OURS = {kind: f"dagrl.bench.peers.dagrl_{kind}" for kind in ("grpo", "generate", "sft")}
ENGINES = {kind: OURS[kind] for kind in ("grpo", "generate")}
TRL = {"grpo": "dagrl.bench.peers.trl_grpo", "sft": "dagrl.bench.peers.trl_sft"}
PEERS = {
    peer.name: peer
    for peer in (
        Peer("trl", "trl", TRL),
        Peer("trl-packed", "trl", {"sft": TRL["sft"]}, variant="packed"),
        Peer("torchtitan", "torchtitan", {"sft": "dagrl.bench.peers.titan_sft"}),
        Peer("vllm", "vllm", {"generate": "dagrl.bench.peers.vllm_generate"}),
        Peer("vllm-async", "vllm", {"generate": "dagrl.bench.peers.vllm_generate"}, variant="async"),
        Peer("dagrl-fp8", "dagrl", ENGINES, variant="fp8"),
        Peer("dagrl-kv", "dagrl", ENGINES, variant="kv"),
        Peer("dagrl-fp8-kv", "dagrl", ENGINES, variant="fp8-kv"),
    )
}
OTHERS = [peer.name for peer in PEERS.values() if peer.package != "dagrl"]
WEIGHTS = {"grpo": 3.0, "sft": 1.0, "generate": 2.0}
"""Shares of the time that is left, by kind: engines start slowly, and whole steps take longest."""

WARM_TOKENS = 32
"""Most tokens of a completion in a turn of `generate` that is not counted."""

T = TypeVar("T")
Round = list[list[float] | None]
"""The seconds of each side's steps in a round of turns, dagrl's first; None for a peer whose side has failed."""


@dataclass(frozen=True)
class Comparison:
    """Cases that the same processes measure: dagrl's side, and one for each peer."""

    cases: tuple[PeerCase, ...]
    peers: tuple[Peer, ...]

    @property
    def name(self) -> str:
        """The name of dagrl's log file."""
        return self.cases[0].name.replace(" ", "-")


@dataclass
class Contender:
    """A peer's side. When it fails, the others go on without it."""

    peer: Peer
    side: Side
    failure: str = ""

    def attempt(self, act: Callable[[Side], T]) -> T | None:
        """Returns what `act` returns for the side; None if that fails, or has failed before."""
        if not self.failure:
            try:
                return act(self.side)
            except RunError as error:
                sys.stderr.write(f"{self.peer.name}: {error}\n")
                self.failure = str(error)
                self.side.end()
        return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dagrl bench peers`."""
    cases = ["grpo 0.6b 128", "grpo 0.6b 512", "sft 0.6b 16", *(f"generate 0.6b {number}" for number in (64, 256, 1024))]
    parser.add_argument("--cases", nargs="+", default=cases, metavar="CASE", help="'KIND MODEL SEQUENCES' each")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=OTHERS, help="default: all others that are installed")
    parser.add_argument("--pairs", type=count, default=5, help="turns of each side; fewer if --deadline comes first")
    parser.add_argument("--steps", type=count, default=4, help="counted steps of a turn")
    parser.add_argument("--completion", type=count, default=256, help="tokens of a completion")
    parser.add_argument("--length", type=count, default=2048, help="tokens of an SFT sequence")
    parser.add_argument("--micro", type=count, help="sequences of a microbatch in GRPO; default: 16, for 4b 4")
    parser.add_argument("--kv-gib", type=float, help="KV cache of each engine; default: what the sequences need, if it fits")
    parser.add_argument("--apart", action="store_true", help="start each side for its turn alone: both need not fit at once")
    parser.add_argument("--tiny", action="store_true", help="a narrow model in float32, also without a GPU")
    parser.add_argument("--logs", type=Path, help="keep the output of the sides in this directory")
    parser.add_argument(
        "--more",
        type=Path,
        nargs="+",
        default=[],
        metavar="F",
        help="add pairs to the rows of these files, of this hardware",
    )
    add_outputs(parser, plot=False)
    add_deadline(parser)


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the rows. Raises RunError if nothing could be measured."""
    cases = [case_of(text, options) for text in options.cases]
    peers = [PEERS[name] for name in options.peers]
    missing = {peer.name: f"{peer.package} is not installed" for peer in peers if not find_spec(peer.package)}
    comparisons = comparisons_of(cases, [peer for peer in peers if peer.name not in missing])
    if not comparisons:
        raise ConfigError(f"--cases and --peers leave nothing to compare; found {missing or 'no peer for these kinds'}")
    earlier = earlier_rows(options.more, cases)
    deadline = BenchDeadline(options.deadline)
    deadline.left_out |= missing

    def show(rows: Sequence[Row]) -> None:
        if not rows:
            raise RunError(f"no case was measured: {deadline.left_out}")
        print_table(rows)

    report_rows(options, measure(comparisons, options, deadline, earlier), show, deadline=deadline)


def earlier_rows(paths: Sequence[Path], cases: Sequence[PeerCase]) -> dict[tuple[str, str], Row]:
    """Returns the rows of earlier runs by case and peer. A row of several runs has the pairs of all.

    Raises ConfigError if one had other hardware, packages or tokens than `cases` have here, or if a file is given twice.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(f"--more: found a file twice in {[str(path) for path in paths]}; name each once")
    rows: dict[tuple[str, str], Row] = {}
    for path in paths:
        for key, row in rows_of(path, cases).items():
            if key in rows and rows[key]["tokens"] != row["tokens"]:
                raise ConfigError(
                    f"--more {path}: {' '.join(key)} has {row['tokens']} tokens, in the files before {rows[key]['tokens']}; "
                    "join runs of equal sizes"
                )
            rows[key] = with_earlier(row, rows.get(key))
    return rows


def rows_of(path: Path, cases: Sequence[PeerCase]) -> dict[tuple[str, str], Row]:
    """Returns the rows of one earlier run by case and peer, with their `commits`. Raises ConfigError as `earlier_rows`."""
    try:
        report = BenchReport.read(path)
        rows = {
            (row["case"], row["peer"]): {"commits": [report.commit], **row, "ratios": row["ratios"]} for row in report.rows
        }
        tokens = {row["case"]: row["tokens"] for row in rows.values()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--more {path}: expected rows of `bench peers` with the ratios of their pairs; {error!r}"
        ) from error
    here = BenchReport([], "")
    compared: list[tuple[str, object, object]] = [
        ("hardware", report.hardware, here.hardware),
        ("versions", report.versions, here.versions),
    ]
    compared += [(f"tokens of {case.name}", tokens[case.name], case.tokens) for case in cases if case.name in tokens]
    for what, found, expected in compared:
        if found != expected:
            raise ConfigError(f"--more {path}: {what}: found {found}, expected {expected} as here; measure without --more")
    return rows


def measure(
    comparisons: Sequence[Comparison],
    options: argparse.Namespace,
    deadline: BenchDeadline,
    earlier: Mapping[tuple[str, str], Row],
) -> Iterator[Sequence[Row]]:
    """Yields all rows so far after each pair of turns. Cases without a row are left out by `deadline`, with the reason.

    Rows of `earlier` get the pairs that are measured now, or stay.
    """
    rows, measured = dict(earlier), set[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as directory:
        for number, comparison in enumerate(comparisons):
            left, later = deadline.left(), sum(WEIGHTS[other.cases[0].kind] for other in comparisons[number:])
            now, share = time.monotonic(), WEIGHTS[comparison.cases[0].kind] / later
            contenders: list[Contender] = []
            failure = ""
            try:
                if left <= 0:
                    raise RunError(TIME_IS_UP)
                ours, contenders = sides_of(comparison, options.logs or Path(directory), Path(directory), now + left)
                for row in compare(comparison.cases, ours, contenders, options, now + left * share):
                    key = row["case"], row["peer"]
                    rows[key] = with_earlier(row, earlier.get(key))  # in place of the one with fewer pairs
                    measured.add(key)
                    yield list(rows.values())
            except RunError as error:  # reported; others may still run
                failure = str(error)
                sys.stderr.write(f"{comparison.name}: {failure}\n")
            failures = {contender.peer.name: contender.failure for contender in contenders}
            for case, peer in product(comparison.cases, comparison.peers):
                if (case.name, peer.label()) not in measured:
                    deadline.left_out[f"{case.name} {peer.name}"] = failures.get(peer.name) or failure


def case_of(text: str, options: argparse.Namespace) -> PeerCase:
    """Returns the case named `text` with the sizes of the options."""
    sizes = {name: getattr(options, name) for name in ("completion", "length", "micro", "kv_gib", "tiny")}
    return parse_case(text, prompt=120, **sizes, together=not options.apart)


def comparisons_of(cases: Sequence[PeerCase], peers: Sequence[Peer]) -> list[Comparison]:
    """Returns the cases with the peers that have their kind. Cases of one model in a row share processes, except `sft`."""
    groups = [
        group
        for (kind, _), found in groupby(cases, lambda case: (case.kind, case.model))
        for group in ([(case,) for case in found] if kind == "sft" else [tuple(found)])
    ]
    fitting = [(group, tuple(peer for peer in peers if group[0].kind in peer.modules)) for group in groups]
    return [Comparison(group, found) for group, found in fitting if found]


def compare(
    cases: Sequence[PeerCase], ours: Side, contenders: Sequence[Contender], options: argparse.Namespace, until: float
) -> Iterator[Row]:
    """Lets dagrl and the peers take turns until about `until`, at least one each before the deadline of the sides.

    Yields the rows of a case after every round. Raises RunError if dagrl's side fails, or works at the deadline.
    """
    with ExitStack() as stack:
        if not options.apart:
            started(ours, contenders, stack)
        for number, case in enumerate(cases):
            left = (until - time.monotonic()) / (len(cases) - number)
            rounds: list[Round] = []
            take_turns = apart if options.apart else together
            for seconds in within(take_turns(ours, contenders, case, options), time.monotonic() + left):
                rounds.append(seconds)
                for index, contender in enumerate(contenders, 1):
                    if seconds[index] is not None:
                        turns = [(one[0] or [], one[index] or []) for one in rounds]
                        yield as_row(case, contender.peer, turns, ours.notes, contender.side.notes)


def sides_of(comparison: Comparison, logs: Path, directory: Path, deadline: float) -> tuple[Side, list[Contender]]:
    """Returns dagrl's side and the peers', which have not started."""
    logs.mkdir(parents=True, exist_ok=True)
    case = comparison.cases[0]
    kind, order = case.kind, SideOrder(comparison.cases, write_with_tokenizer(case.shape, directory, case.precision))

    def side(module: str, name: str, variant: str = "") -> Side:
        return Side(module, replace(order, variant=variant), logs / f"{name}-{comparison.name}.log", deadline)

    theirs = [Contender(peer, side(peer.modules[kind], peer.name, peer.variant)) for peer in comparison.peers]
    return side(OURS[kind], "dagrl"), theirs


def started(ours: Side, contenders: Sequence[Contender], stack: ExitStack) -> None:
    """Starts sides at the same time, and waits for all."""
    for side in (ours, *(contender.side for contender in contenders)):
        stack.enter_context(side)
    for wait in (Side.begin, Side.ready):
        wait(ours)
        for contender in contenders:
            contender.attempt(wait)


def within(rounds: Iterator[Round], until: float) -> Iterator[Round]:
    """Yields the first round, and those that will end before `until` if they take as long as the longest so far."""
    longest, began = 0.0, time.monotonic()
    for seconds in rounds:
        yield seconds
        longest, began = max(longest, time.monotonic() - began), time.monotonic()
        if began + longest > until:
            return


def together(ours: Side, contenders: Sequence[Contender], case: PeerCase, options: argparse.Namespace) -> Iterator[Round]:
    """Yields rounds of turns of sides that stay. The first turns of a case compile and are not counted."""
    first = replace(case, completion=min(WARM_TOKENS, case.completion)) if case.kind == "generate" else case
    one_round(ours, contenders, lambda side: side.take(first, 1))
    for _ in range(options.pairs):
        yield one_round(ours, contenders, lambda side: side.take(case, options.steps))


def apart(ours: Side, contenders: Sequence[Contender], case: PeerCase, options: argparse.Namespace) -> Iterator[Round]:
    """Yields rounds of turns of sides that are started for each."""

    def alone(side: Side) -> list[float]:
        with side:
            side.begin()
            side.ready()
            side.take(case, 1)
            return side.take(case, options.steps)

    for _ in range(options.pairs):
        yield one_round(ours, contenders, alone)


def one_round(ours: Side, contenders: Sequence[Contender], take: Callable[[Side], list[float]]) -> Round:
    """Lets each side take a turn. Raises RunError if dagrl's fails, or those of all peers have failed."""
    if all(contender.failure for contender in contenders):
        raise RunError("the sides of all peers have failed")
    return [take(ours), *(contender.attempt(take) for contender in contenders)]


def as_row(
    case: PeerCase,
    peer: Peer,
    turns: Sequence[tuple[list[float], list[float]]],
    ours_notes: Mapping[str, float],
    theirs_notes: Mapping[str, float],
) -> Row:
    """Returns the row of a case from its pairs of turns: the seconds of dagrl's and of the peer's steps."""
    ours, theirs = ([second for pair in turns for second in pair[side]] for side in (0, 1))
    ratios = [median(second) / median(first) for first, second in turns]
    notes = {"ours_notes": dict(ours_notes), "theirs_notes": dict(theirs_notes)}
    return {"case": case.name, "peer": peer.label(), **summary(ours, theirs, ratios, case.tokens), **notes}


def summary(ours: Sequence[float], theirs: Sequence[float], ratios: Sequence[float], tokens: int) -> Row:
    """Returns what steps and pairs of turns add up to. Times are medians over steps; `ratio` is the median over pairs of the
    peer's time over dagrl's."""
    return {
        "ours_s": round(median(ours), 4),
        "theirs_s": round(median(theirs), 4),
        "ratio": round(median(ratios), 3),
        "low": round(min(ratios), 3),
        "high": round(max(ratios), 3),
        "pairs": len(ratios),
        "steps": len(ours),
        "tokens": tokens,
        "ours_tokens_per_s": round(tokens / median(ours), 1),
        "theirs_tokens_per_s": round(tokens / median(theirs), 1),
        "ours_steps_s": [round(second, 4) for second in ours],
        "theirs_steps_s": [round(second, 4) for second in theirs],
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def with_earlier(row: Row, earlier: Row | None) -> Row:
    """Returns a row with the pairs of `earlier`, from another run, in front of its own. `commits` are those of both."""
    if earlier is None:
        return row
    ours, theirs, ratios = (earlier[name] + row[name] for name in ("ours_steps_s", "theirs_steps_s", "ratios"))
    commits = list(dict.fromkeys([*earlier["commits"], *row.get("commits", [commit()])]))
    return row | summary(ours, theirs, ratios, row["tokens"]) | {"commits": commits}


def print_table(rows: Sequence[Row]) -> None:
    """Prints the rows."""
    columns = "case, peer, dagrl s, peer s, ratio, low, high, pairs, dagrl tokens/s, peer tokens/s"
    names = "case peer ours_s theirs_s ratio low high pairs ours_tokens_per_s theirs_tokens_per_s".split()
    print_rows(columns.split(", "), ([row[name] for name in names] for row in rows))
