"""`run_all` on a host without GPUs: pieces that fail, take too long or cannot run are told, and the others run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import run_all
from bench.gpu.environment import Environment
from bench.gpu.parts import Piece, pieces
from bench.gpu.run_all import _wanted, run_piece, summary
from bench.gpu.runs import run_table

HERE = Environment(("NVIDIA H200", "NVIDIA H200"), (143771, 143771), "580", "NV18", "64-core host", "6.18", {}, {}, "abc")


def piece(name: str, code: str, **keys: object) -> Piece:
    return replace(Piece("part", name, (sys.executable, "-c", code)), **keys)  # type: ignore[arg-type]


def test_one_piece_that_fails_does_not_stop_the_rest(tmp_path: Path) -> None:
    outcomes = [
        run_piece(part, HERE, tmp_path)
        for part in (
            piece("good", "open('{out}/good.json', 'w').write('{{}}')"),
            piece("bad", "print('the reason'); raise SystemExit(3)"),
            piece("slow", "import time; time.sleep(60)", limit_s=1),
            piece("unready", "print('never')", before=(sys.executable, "-c", "raise SystemExit(4)")),
            piece("large", "print('never')", gpus=8),
            piece("absent", "print('never')", bench="no-such-bench"),
        )
    ]
    results = {outcome.piece.name: (outcome.result, outcome.note) for outcome in outcomes}
    assert results == {
        "good": ("passed", ""),
        "bad": ("FAILED", "exit code 3"),
        "slow": ("TOO LONG", "stopped after 1 s"),
        "unready": ("FAILED", "exit code 4"),
        "large": ("left out", "needs 8 GPUs, this host has 2"),
        "absent": ("missing", "there is no `dagrl bench no-such-bench`"),
    }
    page = summary(outcomes, HERE, tmp_path)
    assert "| good | passed |" in page and "[json](good.json)" in page
    assert "the reason" in (tmp_path / "bad.log").read_text()


def test_parts_and_pieces_are_chosen_by_name() -> None:
    every = pieces(4)
    assert {found.part for found in _wanted("compare,faults", every)} == {"compare", "faults"}
    assert [found.name for found in _wanted("run-sync", every)] == ["run-sync"]
    with pytest.raises(SystemExit, match="there are no parts"):
        _wanted("stepp", every)
    assert len({found.name for found in every}) == len(every)
    assert max(found.limit_s for found in every) <= 600


def test_the_hosts_gpus_name_the_directory() -> None:
    assert HERE.slug == "2x-nvidia-h200"


def test_the_exit_code_counts_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "environment", lambda: HERE)
    monkeypatch.setattr(run_all, "pieces", lambda gpus: [piece("bad", "raise SystemExit(1)"), piece("good", "")])
    monkeypatch.setattr(sys, "argv", ["run_all", "--out", str(tmp_path)])
    assert run_all.main() == 1
    assert "| bad | FAILED |" in (tmp_path / "README.md").read_text()


def test_runs_make_a_table(tmp_path: Path) -> None:
    steps = [
        {"step": step, "stage": "grpo", "time": 0.0, "loss": 0.1 * step, "reward/mean": 0.5, "gen_kl_error": 1e-4 * step}
        for step in (1, 2, 3)
    ]
    path = tmp_path / "run-sync.metrics.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    head, _, row = run_table([path])
    assert head.startswith("| run | steps | first loss")
    assert row.startswith("| sync | 3 | 0.1000 | 0.3000 | 0.5000 | 0.5000 | 2.0e-04 | 3.0e-04 |")
    assert run_table([]) == []
