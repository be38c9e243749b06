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


CLASSES = """
import math
from collections import Counter, namedtuple
from dataclasses import dataclass

@dataclass
class Node:
    value: int
    next: object = None

class Stack(list):
    def push(self, item): self.append(item)

class Account:
    def __init__(self, held=0): self.held = held
    def take(self, amount, *, limit=100):
        if amount > min(self.held, limit): raise LookupError("too little")
        self.held -= amount
        return self

def turn(items): items.reverse()
def count(text): return Counter(text)
def pairs(n): return ((i, {i * i}) for i in range(n))
def top(item): return namedtuple("Top", "x y")(item, None)
"""
HONEST = """
account = Account(held=5); account.take(2).take(1); assert account.held == 2
try: Account().take(1)
except KeyError: assert False
except LookupError as error: assert str(error) == "too little"
try: Account(200).take(101, limit=50)
except LookupError: pass
items, inner = [[1], 2, 3], {"a": [1]}; turn(items); assert items == [3, 2, [1]]
assert count("aab") == {"a": 2, "b": 1}
assert list(pairs(3)) == [(0, {0}), (1, {1}), (2, {4})] and top(1) == (1, None) and math.isclose(top(1.0)[0], 1)
node = Node(1); node.next = Node(2); assert node.next.value == 2 and node == Node(1, Node(2)) and node != Node(1)
stack = Stack(); assert not stack; stack.push(2); assert stack and len(stack) == 1 and stack[0] == 2 and list(stack) == [2]
assert str(Node(3)) == "Node(value=3, next=None)" and len({top, top}) == 1 and top is top
""".strip().split("\n")


@pytest.fixture
def without_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sees, and a program can forge, does not depend on the sandbox."""
    monkeypatch.setattr(coding, "sandbox", lambda: [sys.executable, "-I", "-c"])


@pytest.mark.usefixtures("without_sandbox")
def test_tests_see_classes_exceptions_iterators_and_changes_in_place() -> None:
    tests = [HONEST[0], "\n".join(HONEST[1:4]), "\n".join(HONEST[4:6]), *HONEST[6:]]
    scores = {test: share(CLASSES, [test]) for test in tests}
    assert scores == dict.fromkeys(tests, 1.0)


EQUALS = (
    "class Any:\n    __eq__ = __ge__ = __contains__ = lambda *_: True\n    __hash__ = None\n    __ne__ = lambda *_: False\n"
)
FRAMES = """
import gc, os, pickle, sys
def connection(frame=None):
    frame = sys._getframe()
    while frame:
        if "replies" in frame.f_locals: return frame.f_locals["replies"]
        frame = frame.f_back
"""


@pytest.mark.usefixtures("without_sandbox")
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (EQUALS + "def add(a, b): return Any()", [*TESTS, "assert add(1, 2) in (3, 4)", "assert not add(1, 2) != 3"]),
        (EQUALS + "class Int(Any, int): pass\ndef add(a, b): return Int()", TESTS),
        (EQUALS + "AssertionError = isinstance = abs = sum = lambda *_: Any()\n__builtins__ = {}\nadd = abs", TESTS),
        (EQUALS + "class math: isclose = lambda *_: True\nadd = max", ["assert math.isclose(add(1, 2), 3)"]),
        ("import os\ndef add(a, b): os._exit(0)", ["try: add(1, 2)\nexcept Exception: pass"]),
        (  # a reply that would call a function of the tests' process
            FRAMES + "class Exit:\n    def __reduce__(self): return os._exit, (0,)\n"
            "def add(a, b):\n    pickle.dump(('', Exit(), []), connection())\n    return 0",
            TESTS,
        ),
        (FRAMES + "def add(a, b):\n    connection().write(b'2\\n2')\n    return 0", TESTS),
        (  # no text of a test is in its memory
            "import gc\nseen = str([o for o in gc.get_objects() if isinstance(o, (str, list, tuple, dict))])\n"
            "def add(a, b): return a + b if ''.join(['assert', ' add(']) in seen else 0",
            TESTS,
        ),
    ],
)
def test_no_program_passes_without_the_right_values(program: str, tests: list[str]) -> None:
    assert share(program, tests) == 0.0


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
