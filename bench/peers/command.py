"""The command `dagrl bench peers`: starts both sides of each case, lets them take turns, and reports paired ratios."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from dagrl.bench.deadline import BenchDeadline, add_deadline
from dagrl.bench.peers.case import PeerCase, SideOrder, parse_case
from dagrl.bench.peers.turns import Side
from dagrl.bench.report import write_rows
from dagrl.errors import ConfigError, RunError


@dataclass(frozen=True)
class Peer:
    """What dagrl is compared with: its module by kind of case, and the package whose version is reported."""

    name: str
    package: str
    modules: Mapping[str, str]
    variant: str = ""

    def label(self) -> str:
        """The peer's name with its version."""
        installed = metadata.packages_distributions()[self.package][0]  # vLLM for CPUs is another distribution
        return f"{self.name}-{metadata.version(installed)}"


TRL = {"grpo": "dagrl.bench.peers.trl_grpo", "sft": "dagrl.bench.peers.trl_sft"}
PEERS = {
    peer.name: peer
    for peer in (
        Peer("trl", "trl", TRL),
        Peer("trl-packed", "trl", {"sft": TRL["sft"]}, variant="packed"),
        Peer("vllm", "vllm", {"generate": "dagrl.bench.peers.vllm_generate"}),
        Peer("vllm-async", "vllm", {"generate": "dagrl.bench.peers.vllm_generate"}, variant="async"),
    )
}
OURS = {
    "grpo": "dagrl.bench.peers.dagrl_grpo",
    "generate": "dagrl.bench.peers.dagrl_grpo",
    "sft": "dagrl.bench.peers.dagrl_sft",
}
START_S = 400.0
"""How long a side may take to start, and to take a turn."""


@dataclass(frozen=True)
class PeerRow:
    """One case and peer: medians over steps in seconds, and the peer's time over dagrl's, by pair of turns."""

    case: str
    peer: str
    ours_s: float
    theirs_s: float
    ratio: float
    low: float
    high: float
    pairs: int
    steps: int
    tokens: int
    ours_tokens_per_s: float
    theirs_tokens_per_s: float
    ours_steps_s: list[float]
    theirs_steps_s: list[float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dagrl bench peers`."""
    cases = ["grpo 0.6b 128", "grpo 0.6b 512", "sft 0.6b 16", "generate 0.6b 64", "generate 0.6b 256"]
    parser.add_argument("--cases", nargs="+", default=cases, metavar="CASE", help="'KIND MODEL SEQUENCES' each")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="default: all that are installed")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--completion", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--length", type=int, default=2048, help="tokens of an SFT sequence")
    parser.add_argument("--micro", type=int, default=32, help="sequences of TRL's microbatch")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="KV cache of each engine")
    parser.add_argument("--apart", action="store_true", help="start each side for its turn alone: both need not fit at once")
    parser.add_argument("--tiny", action="store_true", help="a narrow model in float32, also without a GPU")
    parser.add_argument("--logs", type=Path, help="keep the output of the sides in this directory")
    parser.add_argument("--json", type=Path, help="write the rows to this JSON file, after every row")
    add_deadline(parser)


def run(options: argparse.Namespace) -> None:
    """Measures, prints the table and writes the rows. Raises RunError if nothing could be measured."""
    cases = [case_of(text, options) for text in options.cases]
    peers = [PEERS[name] for name in options.peers]
    deadline, rows = BenchDeadline(options.deadline), list[PeerRow]()
    left_out = {peer.name: f"{peer.package} is not installed" for peer in peers if not find_spec(peer.package)}
    pairings = [(case, peer) for case in cases for peer in peers if case.kind in peer.modules and peer.name not in left_out]
    if not pairings:
        raise ConfigError(f"--cases and --peers leave nothing to compare; found {left_out or 'no peer for these kinds'}")
    with tempfile.TemporaryDirectory() as directory:
        for case, peer in deadline.each(pairings, lambda pairing: f"{pairing[0].name} {pairing[1].name}"):
            name = f"{case.name} {peer.name}"
            done = list(rows)
            try:
                for row in compare(case, peer, options, Path(directory)):
                    rows = [*done, row]
                    write_rows(options.json, rows, {**left_out, **deadline.left_out})
            except RunError as error:  # reported; other cases may still run
                left_out[name] = str(error)
                sys.stderr.write(f"{name}: {error}\n")
            write_rows(options.json, rows, {**left_out, **deadline.left_out})
    print_table(rows)
    deadline.tell()
    if not rows:
        raise RunError(f"no case was measured: {left_out}")


def case_of(text: str, options: argparse.Namespace) -> PeerCase:
    """Returns the case named `text` with the sizes of the options."""
    sizes = {name: getattr(options, name) for name in ("completion", "length", "micro", "kv_gib", "tiny")}
    return parse_case(text, prompt=120, **sizes)


def compare(case: PeerCase, peer: Peer, options: argparse.Namespace, directory: Path) -> Iterator[PeerRow]:
    """Lets dagrl and a peer take turns, after one untimed step each. Yields the row after every pair."""
    model = write_checkpoint(case, directory)
    logs = options.logs or directory
    logs.mkdir(parents=True, exist_ok=True)
    sides = (
        Side(OURS[case.kind], SideOrder(case, model), logs / f"dagrl-{case.kind}.log"),
        Side(peer.modules[case.kind], SideOrder(case, model, peer.variant), logs / f"{peer.name}-{case.kind}.log"),
    )
    turns = []
    for pair in apart(sides, options) if options.apart else together(sides, options):
        turns.append(pair)
        yield as_row(case, peer, turns)


def together(sides: tuple[Side, Side], options: argparse.Namespace) -> Iterator[tuple[list[float], list[float]]]:
    """Yields pairs of turns of two sides that stay."""
    with ExitStack() as stack:
        for side in sides:  # one after the other: an engine sizes its memory by what is free
            stack.enter_context(side).ready(START_S)
            side.take(1, START_S)
        for _ in range(options.pairs):
            yield sides[0].take(options.steps, START_S), sides[1].take(options.steps, START_S)


def apart(sides: tuple[Side, Side], options: argparse.Namespace) -> Iterator[tuple[list[float], list[float]]]:
    """Yields pairs of turns of sides that are started for each."""
    for _ in range(options.pairs):
        taken = []
        for side in sides:
            with side:
                side.ready(START_S)
                side.take(1, START_S)
                taken.append(side.take(options.steps, START_S))
        yield taken[0], taken[1]


def write_checkpoint(case: PeerCase, directory: Path) -> Path:
    """Writes the model that both sides start from, once."""
    from dagrl.bench.gpu.models import CHARACTERS
    from dagrl.bench.models import write_model
    from dagrl.run.model import character_tokenizer

    model = directory / case.shape.name
    if not model.exists():
        import torch

        write_model(case.shape, directory, "cuda" if torch.cuda.is_available() else "cpu", case.precision)
        character_tokenizer(CHARACTERS).save_pretrained(model)
    return model


def as_row(case: PeerCase, peer: Peer, turns: Sequence[tuple[list[float], list[float]]]) -> PeerRow:
    """Returns the row of a case from its pairs of turns."""
    ours, theirs = ([second for pair in turns for second in pair[side]] for side in (0, 1))
    ratios = [median(second) / median(first) for first, second in turns]
    return PeerRow(
        case=case.name,
        peer=peer.label(),
        ours_s=round(median(ours), 4),
        theirs_s=round(median(theirs), 4),
        ratio=round(median(ratios), 3),
        low=round(min(ratios), 3),
        high=round(max(ratios), 3),
        pairs=len(turns),
        steps=len(ours),
        tokens=case.tokens,
        ours_tokens_per_s=round(case.tokens / median(ours), 1),
        theirs_tokens_per_s=round(case.tokens / median(theirs), 1),
        ours_steps_s=[round(second, 4) for second in ours],
        theirs_steps_s=[round(second, 4) for second in theirs],
    )


def print_table(rows: Sequence[PeerRow]) -> None:
    """Prints the rows."""
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "peer", "dagrl s", "peer s", "ratio", "low to high", "pairs", "dagrl tokens/s", "peer tokens/s")
    for row in rows:
        table.add_row(
            row.case,
            row.peer,
            f"{row.ours_s:.3f}",
            f"{row.theirs_s:.3f}",
            f"{row.ratio:.2f}",
            f"{row.low:.2f} to {row.high:.2f}",
            str(row.pairs),
            f"{row.ours_tokens_per_s:,.0f}",
            f"{row.theirs_tokens_per_s:,.0f}",
        )
    Console(width=130).print(table)
