"""Programs in a sandbox: what they may do, and what their tests are worth."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from pathlib import Path

import pytest

from dagrl.rl import coding
from dagrl.rl.coding import passed_tests

needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
RIGHT = "def add(a, b): return a + b"


def share(program: str) -> float:
    return asyncio.run(passed_tests("", program, "", TESTS))


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (RIGHT, 1.0),
        (f"So:\n```python\ndef add(a, b): return 0\n```\nNo:\n```python\n{RIGHT}\n```", 1.0),
        ("def add(a, b): return 3", 0.5),
        ("def add(a, b): return a +", 0.0),
        (f"import os\nos._exit(0)\n{RIGHT}", 0.0),  # before its tests
        ("print('x 2')\ndef add(a, b): return 0", 0.0),
        (f"open('/tmp/mine', 'w').write('1')\n{RIGHT}", 1.0),
        (f"open('/usr/mine', 'w')\n{RIGHT}", 0.0),
        (f"open('/etc/passwd')\n{RIGHT}", 0.0),
        (f"import os\nassert 'DAGRL_SECRET' not in os.environ\n{RIGHT}", 1.0),
        (f"import os\nassert len([p for p in os.listdir('/proc') if p.isdigit()]) <= 2\n{RIGHT}", 1.0),
        (f"whole = bytearray(3 << 30)\n{RIGHT}", 0.0),
        (f"open('/tmp/large', 'wb').write(bytes(32 << 20))\n{RIGHT}", 0.0),
    ],
)
def test_programs_are_isolated_and_tested(program: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGRL_SECRET", "1")
    assert share(program) == expected


@needs_bubblewrap
def test_a_program_has_no_network_and_no_endless_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connects = f"import socket\nsocket.create_connection({listening.getsockname()!r}, 5)\n{RIGHT}"
        assert share(connects) == 0.0
    monkeypatch.setattr(coding, "SECONDS", 1.0)
    assert share(f"import time\ntime.sleep(60)\n{RIGHT}") == 0.0


@needs_bubblewrap
def test_the_solutions_of_the_example_pass() -> None:
    lines = (Path(coding.__file__).parents[1] / "examples" / "data" / "coding.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        assert asyncio.run(passed_tests(row["prompt"], row["response"], row["response"], row["tests"])) == 1.0


def test_a_machine_without_bubblewrap_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"bubblewrap .* is not installed; install it"):
        share(RIGHT)
