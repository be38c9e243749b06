"""What became of the pieces of `run_all`, kept beside their results: `pieces.json`, and the page made from it.

Parts that run one after another, also on different days of one directory, add up: an outcome takes the place of the earlier
one of its piece, with its files, and a piece that could not run, had no time for anything, or was stopped, takes nobody's
place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.gpu.environment import Environment
from bench.gpu.runs import run_tables

PIECES = "pieces.json"
STOPPED = "STOPPED"
FAILURES = ("FAILED", "TOO LONG", STOPPED)
TAKE_NO_PLACE = ("left out", "missing", STOPPED)


@dataclass(frozen=True)
class Outcome:
    """What became of a piece: `passed`, `FAILED`, `TOO LONG`, `STOPPED`, `left out`, `missing`; which code, when (UTC)."""

    piece: str
    result: str
    seconds: float = 0.0
    note: str = ""
    command: str = ""
    commit: str = ""
    ended: str = ""


def kept(out: Path) -> dict[str, Outcome]:
    """What earlier runs left in this directory, by piece."""
    path = out / PIECES
    return {row["piece"]: Outcome(**row) for row in json.loads(path.read_text())} if path.exists() else {}


def own_directory(out: Path) -> Path:
    """`out`, or the next one of that name (`-2`, `-3`, ...) whose page, if it has one, was made here."""
    directory, number = out, 1
    while (directory / "README.md").exists() and not (directory / PIECES).exists():
        number += 1
        directory = out.with_name(f"{out.name}-{number}")
    return directory


def keep(outcome: Outcome, made: Path, order: Sequence[str], here: Environment, out: Path) -> None:
    """Add an outcome, and its files in `made`, to those in `out`, and write its page anew, in the order of `order`."""
    every = kept(out)
    earlier = every.get(outcome.piece)
    taken = bool(_files(outcome.piece, out)) if earlier is None else earlier.result not in TAKE_NO_PLACE
    if outcome.result not in TAKE_NO_PLACE or not taken:
        every[outcome.piece] = outcome
        for path in _files(outcome.piece, out):
            path.unlink()
        for path in _files(outcome.piece, made):
            shutil.move(path, out / path.name)
    places = {name: place for place, name in enumerate(order)}
    rows = sorted(every.values(), key=lambda row: places.get(row.piece, len(places)))
    (out / PIECES).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    (out / "README.md").write_text(page(rows, here, out))


def page(outcomes: Sequence[Outcome], here: Environment, out: Path) -> str:
    """The page of a results' directory."""
    lines = [f"# {here.slug}, {out.name}", "", "```", here.text().rstrip(), "```", ""]
    lines += ["| piece | result | seconds | | commit | files |", "|---|---|---|---|---|---|"]
    files = {row.piece: _files(row.piece, out) for row in outcomes}
    for row in outcomes:
        links = " ".join(f"[{path.name.removeprefix(row.piece)[1:]}]({path.name})" for path in files[row.piece])
        seconds = f"{row.seconds:.0f}" if row.seconds else ""
        lines.append(f"| {row.piece} | {row.result} | {seconds} | {row.note} | {row.commit} | {links} |")
    lines += [f"\n![{path.stem}]({path.name})" for row in outcomes for path in files[row.piece] if path.suffix == ".png"]
    lines += ["", *run_tables(sorted(out.glob("run-*.metrics.jsonl")))]
    return "\n".join(lines).rstrip() + "\n"


def _files(piece: str, directory: Path) -> list[Path]:
    """What a piece left: `<piece>.json`, `.png`, `.log` and what is kept of a run."""
    return sorted(directory.glob(f"{piece}.*"))
