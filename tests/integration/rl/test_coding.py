"""Programs in a sandbox: what they may do, and what their tests are worth."""

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dagrl.rl import coding
from dagrl.rl.coding import chosen_sandbox, passed_tests

TOOLS = {"bubblewrap": "bwrap", "nsjail": "nsjail", "podman": "podman"}
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
RIGHT = "def add(a, b): return a + b"


@pytest.fixture(scope="module", params=TOOLS)
def tool(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hides the other tools for sandboxes."""
    which, others = shutil.which, set(TOOLS.values()) - {TOOLS[request.param]}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shutil, "which", lambda name: None if name in others else which(name))
        chosen_sandbox.cache_clear()
        try:
            chosen_sandbox()
        except RuntimeError as error:
            pytest.skip(str(error))
        yield
    chosen_sandbox.cache_clear()


def share(program: str, tests: Sequence[str] = TESTS) -> float:
    return asyncio.run(passed_tests("", program, "", tests))


@pytest.mark.usefixtures("tool")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (RIGHT, 1.0),
        (f"So:\n```python\ndef add(a, b): return 0\n```\nNo:\n```python\n{RIGHT}\n```", 1.0),
        ("def add(a, b): return 3", 0.5),
        ("def add(a, b): return a +", 0.0),
        (f"import os\nos._exit(0)\n{RIGHT}", 0.0),  # before its tests
        ("print('x 2')\ndef add(a, b): return 0", 0.0),
        ("import sys\ndef add(a, b): sys.exit()", 0.0),
        ("import os\ndef add(a, b): os._exit(0)", 0.0),
        (f"open('/tmp/mine', 'w').write('1')\n{RIGHT}", 1.0),
        (f"open('/usr/mine', 'w')\n{RIGHT}", 0.0),
        (f"open('/etc/passwd')\n{RIGHT}", 0.0),
        (f"import os\nassert 'DAGRL_SECRET' not in os.environ\n{RIGHT}", 1.0),
        (f"import os\nassert os.getpid() <= 2 and not os.path.exists('/proc/3')\n{RIGHT}", 1.0),
        (f"import os\nos.setuid(0)\n{RIGHT}", 0.0),
        (f"whole = bytearray(3 << 30)\n{RIGHT}", 0.0),
        (f"open('/tmp/large', 'wb').write(bytes(32 << 20))\n{RIGHT}", 0.0),
    ],
)
def test_programs_are_isolated_and_tested(program: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGRL_SECRET", "1")
    assert share(program) == expected


def test_tests_pass_functions_and_see_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "sandbox", lambda: [sys.executable, "-I", "-c"])
    program = "class TooLarge(ValueError): pass\ndef twice(f, x):\n    if x > 9: raise TooLarge(x)\n    return f(f(x))"
    right = ["assert twice(lambda x: x + 1, 1) == 3", "try: twice(len, 10)\nexcept TooLarge: pass"]
    assert share(program, [*right, "assert twice(abs, 1) == 2", "twice(abs, 11)"]) == 0.5


@pytest.mark.usefixtures("tool")
def test_a_program_has_no_network_and_no_endless_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connects = f"import socket\nsocket.create_connection({listening.getsockname()!r}, 5)\n{RIGHT}"
        assert share(connects) == 0.0
    monkeypatch.setattr(coding, "SECONDS", 1.0)
    assert share(f"import time\ntime.sleep(60)\n{RIGHT}") == 0.0


@pytest.mark.skipif(not any(map(shutil.which, TOOLS.values())), reason="needs a sandbox")
def test_the_solutions_of_the_example_pass() -> None:
    lines = (Path(coding.__file__).parents[1] / "examples" / "data" / "coding.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        assert asyncio.run(passed_tests(row["prompt"], row["response"], row["response"], row["tests"])) == 1.0


@pytest.mark.usefixtures("tool")
def test_a_fork_bomb_ends_at_the_limit() -> None:
    """It counts children that sleep; far more than the limit are not tried."""
    bomb = """
import os, time
def forked(at_most):
    for count in range(at_most):
        try:
            if os.fork() == 0: time.sleep(8), os._exit(0)
        except OSError: return count
    return at_most
"""
    assert share(bomb, ["assert 200 < forked(400) < 256"]) == 1.0


@pytest.mark.parametrize(
    ("path", "says"), [(None, "is installed; install bubblewrap"), ("/bin/false", "They need user namespaces")]
)
def test_a_machine_without_a_sandbox_is_told_so(path: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: path)
    chosen_sandbox.cache_clear()
    with pytest.raises(RuntimeError, match=says):
        share(RIGHT)
