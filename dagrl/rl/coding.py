"""Rewards of a coding task: the completion is a Python program, which has to pass the example's tests in a sandbox.

    reward: {function: "dagrl.rl.coding:passed_tests", batched: false, max_concurrency: 4, timeout_s: 30}

A row has a column `tests`: a list of Python texts, each of which raises if the program is wrong. The reward is the share
that passes. Programs run under bubblewrap (https://github.com/containers/bubblewrap, `apt install bubblewrap`) in namespaces
of their own: without network, environment variables and other processes, with Python alone to read and an empty directory to
write, and with limits of time, memory and file size.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import sys
from collections.abc import Sequence

SECONDS = 10.0
"""Time of a program with all of its tests, in seconds."""

MEMORY_BYTES = 2 << 30
FILE_BYTES = 16 << 20

ISOLATED = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
    *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"),  # noqa: S108  # the sandbox's own
)
"""Options of `bwrap`: new namespaces of every kind, no terminal, no variables, and the end with its parent."""

RUNNER = f"""
import json, resource, sys
for limit, value in (("CPU", {SECONDS:.0f}), ("AS", {MEMORY_BYTES}), ("FSIZE", {FILE_BYTES}), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
secret, program, tests = json.load(sys.stdin)
names, passed = {{"__name__": "program"}}, 0
exec(compile(program, "program", "exec"), names)
for test in tests:
    try:
        exec(compile(test, "test", "exec"), dict(names))
        passed += 1
    except BaseException:
        pass
sys.stdout.write(f"\\n{{secret}} {{passed}}")
"""
"""Runs a program and its tests. A program that exits by itself has passed none, as the secret is written after the tests.

Program and tests share an interpreter: a program that looks for the secret there can cheat."""

_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


async def passed_tests(prompt: str, completion: str, reference: str, tests: Sequence[str]) -> float:
    """Returns the share of the tests that the program passes: the last code block of the completion, or all of it."""
    blocks = _BLOCK.findall(completion)
    program, secret = blocks[-1] if blocks else completion, secrets.token_hex(16)
    running = await asyncio.create_subprocess_exec(
        *sandbox(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        content = json.dumps([secret, program, list(tests)]).encode()
        written = (await asyncio.wait_for(running.communicate(content), SECONDS))[0]
    except TimeoutError:
        return 0.0
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    last, _, passed = written.rpartition(b"\n")[2].decode(errors="replace").partition(" ")
    return int(passed) / len(tests) if last == secret else 0.0


def sandbox() -> list[str]:
    """Returns the command that runs `RUNNER` in a sandbox. Raises RuntimeError without bubblewrap."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise RuntimeError("bubblewrap (bwrap) is not installed; install it (apt install bubblewrap) on the driver's host")
    roots = dict.fromkeys(("/usr", "/bin", "/lib", "/lib64", sys.base_prefix, sys.prefix))
    readable = [word for root in roots for word in ("--ro-bind-try", root, root)]
    return [bubblewrap, *ISOLATED, *readable, sys.executable, "-I", "-c", RUNNER]
