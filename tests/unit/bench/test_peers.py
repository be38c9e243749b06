"""`bench peers`: cases, paired ratios, and sides that fail or hang; two real sides are compared in a slow test."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from dagrl.bench.deadline import TIME_IS_UP
from dagrl.bench.peers import command
from dagrl.bench.peers.case import PeerCase, SideOrder, parse_case
from dagrl.bench.peers.command import PEERS, Peer, as_row, comparisons_of, within
from dagrl.bench.turns import Side
from dagrl.errors import ConfigError, RunError

SIZES = {"prompt": 120, "completion": 256, "length": 2048, "micro": 32, "kv_gib": 8.0, "tiny": True}


def case(text: str = "grpo 0.6b 128") -> PeerCase:
    return parse_case(text, **SIZES)  # type: ignore[arg-type]


def test_cases_of_a_model_share_processes_except_sft() -> None:
    texts = ("grpo 0.6b 8", "grpo 0.6b 16", "generate 0.6b 8", "generate 0.6b 16", "sft 0.6b 8", "sft 0.6b 16")
    found = comparisons_of([case(text) for text in texts], [PEERS[name] for name in ("trl", "vllm", "vllm-async")])
    assert [([peer.name for peer in item.peers], [one.sequences for one in item.cases]) for item in found] == [
        (["trl"], [8, 16]),
        (["vllm", "vllm-async"], [8, 16]),
        (["trl"], [8]),
        (["trl"], [16]),
    ]


def test_turns_end_when_the_next_pair_would_be_late_but_there_is_one() -> None:
    def pairs() -> Iterator[list[list[float]]]:
        for _ in range(9):
            time.sleep(0.05)
            yield [[1.0], [2.0]]

    assert len(list(within(pairs(), time.monotonic() - 1))) == 1
    assert 1 < len(list(within(pairs(), time.monotonic() + 0.24))) < 6
    assert len(list(within(pairs(), math.inf))) == 9


def test_the_kv_cache_holds_all_sequences() -> None:
    one = parse_case("generate 0.6b 64", **{**SIZES, "kv_gib": None, "tiny": False})  # type: ignore[arg-type]
    unshared = 64 * (120 + 256) * 28 * 2 * 8 * 128 * 2
    assert 0.7 * unshared < one.kv_bytes < unshared, "a prompt is stored once for its group"


def test_a_case_counts_the_tokens_that_it_completes() -> None:
    assert case().tokens == 128 * 256
    assert case("sft 4b 16").tokens == 16 * 2048
    assert case("sft 4b 16").micro == 16


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("grpo 0.6b", "expected KIND MODEL SEQUENCES"),
        ("dpo 0.6b 8", "with a kind of grpo, sft, generate"),
        ("grpo 7b 8", "a model of 0.6b, 4b"),
        ("generate 0.6b 12", "groups of 8"),
        ("sft 0.6b 0", "at least one"),
    ],
)
def test_a_case_that_cannot_be_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        case(text)


def test_the_ratio_is_the_median_of_the_pairs_so_a_slow_minute_does_not_count() -> None:
    turns = [([1.0, 1.0, 9.0], [2.0, 2.0, 2.0]), ([10.0, 10.0], [20.0, 21.0, 21.0]), ([1.0], [3.0])]
    row = as_row(case(), PEERS["vllm"], turns, {"kl": 1.0}, {})
    assert [row[name] for name in ("ratio", "low", "high", "pairs", "steps")] == [2.1, 2.0, 3.0, 3, 6]
    assert (row["ours_notes"], row["theirs_notes"]) == ({"kl": 1.0}, {})


SIDE = """
import sys, time
from dagrl.bench.turns import serve, take_turns
def work(told):
    if told.order.variant == "broken":
        raise ValueError("no such GPU")
    if told.order.variant == "silent":
        time.sleep(600)
    def take(case, steps):
        if told.order.variant == "tired" and case.sequences > 8:
            raise ValueError("out of memory")
        if case.sequences > 16:
            time.sleep(600)
        return [0.5 * case.sequences] * steps
    take_turns(told, take)
serve(work)
"""


@pytest.fixture
def side_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_side.py").write_text(SIDE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return "a_side"


def test_a_side_takes_turns(side_module: str, tmp_path: Path) -> None:
    small, large = case("generate 0.6b 8"), case("generate 0.6b 16")
    with Side(side_module, SideOrder((small, large), tmp_path), tmp_path / "log") as side:
        side.begin()
        side.ready()
        assert (side.take(small, 2), side.take(large, 1)) == ([4.0, 4.0], [8.0])


@pytest.mark.parametrize(
    ("variant", "longest_s", "reason"), [("broken", 60.0, "no such GPU"), ("silent", 2.0, "did not answer within 2 s")]
)
def test_a_side_that_fails_or_hangs_is_an_error_and_leaves_no_process(
    variant: str, longest_s: float, reason: str, side_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagrl.bench.turns.END_S", 0.5)
    monkeypatch.setattr("dagrl.bench.turns.LONGEST_S", longest_s)
    side = Side(side_module, SideOrder((case(),), tmp_path, variant), tmp_path / "log")
    with pytest.raises(RunError, match=reason), side:
        side.begin()
        side.ready()
    assert side._process.poll() is not None


def report_of(
    cases: list[str], peers: list[str], options: list[str], module: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What `bench peers` reports with `SIDE` for dagrl and for all peers, named as their variants. No side is left."""
    kinds = dict.fromkeys(("generate", "sft"), module)
    monkeypatch.setattr(command, "OURS", kinds)
    monkeypatch.setattr(command, "PEERS", {name: Peer(name, "dagrl", kinds, variant=name) for name in peers})
    monkeypatch.setattr(command, "write_with_tokenizer", lambda shape, directory, dtype: directory)
    sides: list[Side] = []
    enter = Side.__enter__
    monkeypatch.setattr(Side, "__enter__", lambda side: (sides.append(side), enter(side))[1])
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--cases", *cases, "--peers", *peers, *options, "--tiny", "--json", str(directory / "rows.json")]
    command.run(parser.parse_args(words))
    assert len(sides) > len(peers) and all(side._process.poll() is not None for side in sides)
    return cast("dict[str, Any]", json.loads((directory / "rows.json").read_text()))


def test_at_the_deadline_sides_that_hang_are_ended_and_rows_are_kept(
    side_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagrl.bench.turns.CLOSE_S", 0.5)
    cases = ["generate 0.6b 8", "generate 0.6b 64", "sft 0.6b 8"]
    report = report_of(cases, ["double"], ["--pairs", "1", "--deadline", "8"], side_module, tmp_path, monkeypatch)
    assert [(row["case"], row["ratio"]) for row in report["rows"]] == [("generate 0.6b 8", 1.0)]
    assert report["left_out"] == dict.fromkeys(("generate 0.6b 64 double", "sft 0.6b 8 double"), TIME_IS_UP)


@pytest.mark.parametrize("how", [[], ["--apart"]], ids=["together", "apart"])
def test_the_others_go_on_without_a_peer_that_fails(
    how: list[str], side_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases, peers = ["generate 0.6b 8", "generate 0.6b 16"], ["broken", "double", "tired"]
    report = report_of(cases, peers, ["--pairs", "2", *how], side_module, tmp_path, monkeypatch)
    found = [(row["case"], row["peer"], row["ratio"], row["pairs"]) for row in report["rows"]]
    assert [row for row in found if row[1] == "double"] == [(case, "double", 1.0, 2) for case in cases]
    assert [row for row in found if row[1] != "double"] == [(cases[0], "tired", 1.0, 2)]
    reasons = {name: reason.splitlines()[-1] for name, reason in report["left_out"].items()}
    broken = {f"{case} broken": "ValueError: no such GPU" for case in cases}
    assert reasons == {**broken, "generate 0.6b 16 tired": "ValueError: out of memory"}


def test_pairs_are_added_to_those_of_an_earlier_run(
    side_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same hardware, packages and tokens only. Other rows stay; what fails now is told although it has a row."""
    before, rows = tmp_path / "before.json", tmp_path / "rows.json"
    cases = ["generate 0.6b 8", "generate 0.6b 16"]
    report_of(cases, ["double"], ["--pairs", "2"], side_module, tmp_path, monkeypatch)
    old = json.loads(rows.read_text()) | {"commit": "abc"}
    for row in old["rows"]:
        row["ratios"] = [1.5, 3.0]
    old["rows"][1]["peer"] = "tired"
    before.write_text(json.dumps(old))
    more = ["--more", str(before), "--steps", "3"]
    report = report_of(cases[:1], ["double"], [*more, "--pairs", "1"], side_module, tmp_path, monkeypatch)
    first, second = report["rows"]
    assert [first[name] for name in ("ratio", "low", "high", "pairs", "steps", "ratios")] == [
        1.5,
        1.0,
        3.0,
        3,
        11,
        [1.5, 3.0, 1.0],
    ]
    assert first["commits"] == ["abc", report["commit"]] and second == old["rows"][1] | {"commits": ["abc"]}
    report = report_of(cases[1:], ["double", "tired"], [*more, "--pairs", "1"], side_module, tmp_path, monkeypatch)
    assert report["left_out"].keys() == {"generate 0.6b 16 tired"} and len(report["rows"]) == 3
    other = tmp_path / "other.json"
    other.write_text(json.dumps(old | {"commit": "def"}))
    report = report_of(
        cases[:1], ["double"], ["--more", str(before), str(other), "--pairs", "1"], side_module, tmp_path, monkeypatch
    )
    assert [(row["pairs"], row["commits"][:2]) for row in report["rows"]] == [(5, ["abc", "def"]), (4, ["abc", "def"])]
    with pytest.raises(ConfigError, match="a file twice"):
        report_of(cases, ["double"], ["--more", str(before), str(before)], side_module, tmp_path, monkeypatch)
    other.write_text(json.dumps(old | {"rows": [old["rows"][1] | {"tokens": 7}]}))
    with pytest.raises(ConfigError, match="16 tired has 7 tokens, in the files before 4096"):
        report_of(cases[:1], ["double"], ["--more", str(before), str(other)], side_module, tmp_path, monkeypatch)
    for name, value in {"hardware": "a phone", "versions": {}, "rows": [{}]}.items():
        before.write_text(json.dumps(old | {name: value}))
        with pytest.raises(ConfigError, match="--more"):
            report_of(cases, ["double"], more, side_module, tmp_path, monkeypatch)
    before.write_text(json.dumps(old))
    with pytest.raises(ConfigError, match=f"tokens of {cases[0]}: found 2048, expected 1024"):
        report_of(cases, ["double"], [*more, "--completion", "128"], side_module, tmp_path, monkeypatch)


@pytest.mark.slow
def test_generation_is_compared_with_vllm(tmp_path: Path) -> None:
    rows = tmp_path / "peers.json"
    words = [sys.executable, "-m", "dagrl.cli.main", "bench", "peers", "--cases", "generate 0.6b 16", "--peers", "vllm"]
    options = ["--tiny", "--completion", "16", "--pairs", "2", "--steps", "2", "--kv-gib", "0.06", "--json", str(rows)]
    started = time.monotonic()
    subprocess.run([*words, *options], check=True, timeout=280)
    (row,) = json.loads(rows.read_text())["rows"]
    assert row["case"] == "generate 0.6b 16" and row["pairs"] == 2 and row["tokens"] == 256
    assert 0 < row["ours_s"] * row["steps"] < time.monotonic() - started
    assert row["low"] <= row["ratio"] <= row["high"]
