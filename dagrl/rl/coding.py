"""Rewards of a coding task: the completion is a Python program, which has to pass the example's tests in a sandbox.

    reward: {function: "dagrl.rl.coding:passed_tests", batched: false, max_concurrency: 4, timeout_s: 30}

A row has a column `tests`: a list of Python texts, each of which raises if the program is wrong. The reward is the share
that passes. Programs run under bubblewrap (https://github.com/containers/bubblewrap, `apt install bubblewrap`), or else
nsjail or podman, in namespaces of their own: without network, environment variables and other processes, with Python alone
to read and an empty directory to write, and with limits of time, memory, processes and file size.
"""

import asyncio
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SECONDS = 10.0  # time of a program with all of its tests, in seconds
LIMITS = {"CPU": 10, "AS": 2 << 30, "FSIZE": 16 << 20, "CORE": 0, "NPROC": 256}  # `resource.RLIMIT_*` of a program
USER = "{user}"  # stands in a command for the number of a user whom nobody else has

AS_USER = ("setpriv", "--reuid", USER, "--regid", USER, "--clear-groups")

AS_ROOT = (
    *(f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")),
    *("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--perms", "1777"),
)
"""Options of `bwrap` for root: namespaces of every kind but users, so that `setpriv` can change the user inside."""

BUBBLEWRAP = (
    *("--tmpfs", "/tmp", "--chdir", "/tmp", "--dev", "/dev"),  # noqa: S108  # the sandbox's own
    *("--die-with-parent", "--new-session", "--clearenv"),
)
"""Options of `bwrap`: no terminal, no variables, and the end with its parent. `--perms` stands before `--tmpfs`."""

NSJAIL = (
    *("--mode", "o", "--really_quiet", "--disable_rlimits", "--disable_proc", "--cwd", "/tmp"),  # noqa: S108
    *("--mount", "none:/tmp:tmpfs:size=67108864", "-R", "/dev/null", "-R", "/dev/urandom"),
)
"""Options of `nsjail`, which makes new namespaces of every kind by itself."""

PODMAN = (
    *("run", "--rm", "--interactive", "--network=none", "--read-only", "--workdir=/tmp", "--passwd=false"),
    *("--cap-drop=all", "--security-opt=no-new-privileges", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"),
    f"--timeout={SECONDS:.0f}",
)
"""Options of `podman`, whose containers outlive it for `--timeout` seconds at most."""

RUNNER = """import json, os, resource, sys
out = os.dup(1)
os.dup2(2, 1)
secret, limits, program, tests = json.load(sys.stdin)
for limit, value in limits.items(): resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
names, passed = {"__name__": "program"}, 0
exec(compile(program, "program", "exec"), names)
for test in tests:
    try:
        exec(compile(test, "test", "exec"), dict(names))
        passed += 1
    except BaseException: pass
os.write(out, f"{secret} {passed}".encode())
"""
"""Runs a program and its tests. A program that exits has passed none, as the secret is written after the tests.

They share an interpreter: a program that looks for the secret there, or whose objects equal everything, can cheat."""

FORKS = """import os, resource, sys
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try: os.fork() or os._exit(0)
except OSError: sys.stdout.write("limited")
else: sys.stdout.write("forked")
"""
"""Says whether a limit of processes holds."""

_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


async def passed_tests(prompt: str, completion: str, reference: str, tests: Sequence[str]) -> float:
    """Returns the share of the tests that the program passes: the last code block of the completion, or all of it."""
    blocks = _BLOCK.findall(completion)
    secret = secrets.token_hex(16)
    content = json.dumps([secret, LIMITS, blocks[-1] if blocks else completion, list(tests)])
    process = await asyncio.create_subprocess_exec(
        *sandbox(), RUNNER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        written, _ = await asyncio.wait_for(process.communicate(content.encode()), SECONDS)
    except TimeoutError:
        return 0.0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    last, _, passed = written.decode(errors="replace").rpartition(" ")
    return int(passed) / len(tests) if last == secret else 0.0


def sandbox() -> list[str]:
    """Returns the start of a command that runs Python in a sandbox. Raises RuntimeError if this machine has none.

    A run of root has a new user in each, so that the limit of processes holds, which binds no process of root.
    """
    user = str((1 << 20) + secrets.randbelow(1 << 20))
    return [user if word == USER else word for word in chosen_sandbox()[1]]


@cache
def chosen_sandbox() -> tuple[str, list[str]]:
    """Returns the first way to make a sandbox that works here, better one that limits processes, with its name."""
    failures, unlimited = [], None
    for name, command in ways():
        words = ["1048575" if word == USER else word for word in command]
        tried = subprocess.run([*words, FORKS], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
        if tried.stdout == "limited":
            return name, command
        if tried.stdout == "forked":
            unlimited = unlimited or (name, command)
        else:
            failures.append(f"{name}: {tried.stderr.strip() or tried.returncode}")
    if unlimited:
        logger.warning(
            "Programs in a sandbox may start any number of processes, as this run is root's: run it as another user"
        )
        return unlimited
    if not failures:
        raise RuntimeError("no sandbox is installed; install bubblewrap (apt install bubblewrap) on the driver's host")
    raise RuntimeError(
        f"no sandbox works here: {'; '.join(failures)}. They need user namespaces: allow them (sysctl "
        "kernel.unprivileged_userns_clone=1; of a container --security-opt seccomp=unconfined)"
    )


def ways() -> Iterator[tuple[str, list[str]]]:
    """Yields the ways to run Python in a sandbox with what is installed, the fastest first: name and command."""
    python = [sys.executable, "-I", "-c"]
    roots = dict.fromkeys(("/usr", "/bin", "/lib", "/lib64", sys.base_prefix, sys.prefix))
    readable = [root for root in roots if Path(root).exists()]
    if bubblewrap := shutil.which("bwrap"):
        above = dict.fromkeys(str(parent) for root in readable for parent in reversed(Path(root).parents[:-1]))
        inside = [*BUBBLEWRAP, *(word for parent in above for word in ("--dir", parent))]  # else they are root's alone
        inside += [word for root in readable for word in ("--ro-bind", root, root)]
        if os.geteuid() == 0 and shutil.which("setpriv"):
            yield "bubblewrap", [bubblewrap, *AS_ROOT, *inside, *AS_USER, *python]
            yield "bubblewrap", [*AS_USER, bubblewrap, "--unshare-all", *inside, *python]  # root without CAP_SYS_ADMIN
        yield "bubblewrap", [bubblewrap, "--unshare-all", *inside, *python]
    if nsjail := shutil.which("nsjail"):
        inside = [*NSJAIL, *(word for root in readable for word in ("-R", root))]
        if os.geteuid() == 0:
            inside += ["--disable_clone_newuser", "-u", USER, "-g", USER]
        yield "nsjail", [nsjail, *inside, "--", *python]
    if podman := shutil.which("podman"):
        inside = [*PODMAN, *(f"--volume={root}:{root}:ro" for root in readable)]
        if os.geteuid() == 0:
            inside += ["--user", USER]
        yield "podman", [podman, *inside, "--rootfs", _empty_root().name, *python]


@cache
def _empty_root() -> tempfile.TemporaryDirectory[str]:
    """Makes the files of a container: a directory for what is temporary. It is deleted with this process."""
    root = tempfile.TemporaryDirectory(prefix="dagrl-sandbox-")
    Path(root.name).chmod(0o755)  # for the user inside
    (Path(root.name) / "tmp").mkdir()
    (Path(root.name) / "tmp").chmod(0o1777)
    return root
