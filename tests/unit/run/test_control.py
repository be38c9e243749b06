"""The control socket of a run: answers, refusals, who may use it, and what a killed driver leaves."""

from __future__ import annotations

import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dagrl.errors import ConfigError, DagrlError, DeadlineError, LayoutError, RunError
from dagrl.run.control import NAME, ask, control

ANSWER_S = 10.0


def scale(arguments: Mapping[str, Any]) -> str:
    """Fails as `engines` says."""
    errors = {0: LayoutError("expected at least 1"), 7: DeadlineError("late"), 8: RunError("ended"), 9: KeyError("bug")}
    if error := errors.get(arguments["engines"]):
        raise error
    return f"done: {arguments['engines']} engines"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Its path is longer than the address of a socket may be."""
    found = tmp_path / ("long-" * 30)
    found.mkdir()
    return found


def test_a_question_is_answered_and_the_socket_goes_with_the_driver(directory: Path) -> None:
    with control(directory, {"scale": scale}):
        assert stat.S_IMODE((directory / NAME).stat().st_mode) == 0o600
        assert ask(directory, "scale", {"engines": 3}, ANSWER_S) == "done: 3 engines"
    assert not any(directory.iterdir())


@pytest.mark.parametrize(
    ("command", "engines", "kind", "text"),
    [
        ("scale", 0, ConfigError, "refused: expected at least 1"),
        ("scale", 7, DeadlineError, "late: late"),
        ("scale", 8, RunError, "failed: RunError: ended"),
        ("scale", 9, RunError, "failed: KeyError: 'bug'"),
        ("grow", 3, ConfigError, "refused: the command is 'grow'; expected one of scale"),
    ],
)
def test_what_the_driver_refuses_or_fails_at_is_said(
    directory: Path, command: str, engines: int, kind: type[DagrlError], text: str
) -> None:
    with control(directory, {"scale": scale}), pytest.raises(kind, match=text):
        ask(directory, command, {"engines": engines}, ANSWER_S)


@pytest.mark.parametrize("line", [b"[1]\n", b"\xff{\n", b"3" * 100_000, b""], ids=["list", "not JSON", "endless", "nothing"])
def test_nonsense_does_not_disturb_the_driver(directory: Path, line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    with control(directory, {"scale": scale}):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(NAME)
            client.sendall(line)
        assert ask(directory, "scale", {"engines": 3}, ANSWER_S) == "done: 3 engines"


def test_no_driver_answers_for_a_killed_or_missing_run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(NAME)  # and never listens
    for run in (directory, directory / "missing"):
        with pytest.raises(ConfigError, match="no driver answers"):
            ask(run, "status", {}, ANSWER_S)
    with control(directory, {"scale": scale}):
        assert ask(directory, "scale", {"engines": 3}, ANSWER_S) == "done: 3 engines"
