"""Rewards of a coding task: the completion is a Python program, which has to pass the example's tests in a sandbox.

    reward: {function: "dagrl.rl.coding:passed_tests", batched: false, max_concurrency: 4, timeout_s: 30}

A row has a column `tests`: a list of Python texts, each of which raises if the program is wrong. The reward is the share
that passes. Program and tests run in two processes, each under bubblewrap (https://github.com/containers/bubblewrap,
`apt install bubblewrap`) in namespaces of its own: without network, environment variables and other processes, with Python
alone to read and an empty directory to write, and with limits of time, memory, processes and file size.

The program never sees a test, and no object of it can say that it equals what a test expects (`coding_sides.py`).
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SECONDS = 10.0
"""Time of a program with all of its tests, in seconds."""

SIDES = Path(__file__).with_name("coding_sides.py")
"""What runs in both sandboxes, also the limits."""

ISOLATED = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv"),
    *("--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"),  # noqa: S108  # the sandbox's own
)
"""Options of `bwrap`: new namespaces of every kind, no terminal, no variables, and the end with its parent."""

_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


async def passed_tests(prompt: str, completion: str, reference: str, tests: Sequence[str]) -> float:
    """Returns the share of the tests that the program passes: the last code block of the completion, or all of it."""
    blocks = _BLOCK.findall(completion)
    inputs = {"program": blocks[-1] if blocks else completion, "tests": list(tests)}
    ends = dict(zip(inputs, socket.socketpair(), strict=True))
    running = []
    try:
        for side, end in ends.items():
            output = asyncio.subprocess.PIPE if side == "tests" else asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(
                *sandbox(),
                SIDES.read_text(encoding="utf-8"),
                side,
                str(end.fileno()),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=[end.fileno()],
            )
            running.append(process)
            end.close()  # so that one side sees the end of the other
        texts = [json.dumps(text).encode() for text in inputs.values()]
        talks = [process.communicate(text) for process, text in zip(running, texts, strict=True)]
        _, (written, _) = await asyncio.wait_for(asyncio.gather(*talks), SECONDS)
    except TimeoutError:
        return 0.0
    finally:
        for end in ends.values():
            end.close()
        for process in running:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return int(written or b"0") / len(tests)


@cache
def sandbox() -> list[str]:
    """Returns the start of a command that runs Python in a sandbox. Raises RuntimeError if this machine has none."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise RuntimeError("bubblewrap (bwrap) is not installed; install it (apt install bubblewrap) on the driver's host")
    roots = dict.fromkeys(("/usr", "/bin", "/lib", "/lib64", sys.base_prefix, sys.prefix))
    readable = [word for root in roots for word in ("--ro-bind-try", root, root)]
    command = [bubblewrap, *ISOLATED, *readable, sys.executable, "-I", "-c"]
    tried = subprocess.run([*command, "pass"], capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603
    if tried.returncode:
        raise RuntimeError(
            f"bubblewrap cannot make a sandbox here: {tried.stderr.strip()}. It needs user namespaces: allow them (sysctl "
            "kernel.unprivileged_userns_clone=1; of a container --security-opt seccomp=unconfined)"
        )
    return command
