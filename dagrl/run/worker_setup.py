"""Becomes a Ray worker. Ray's own program for this imports all of Ray first, and then the worker does so again.

    python worker_setup.py .../default_worker.py --serialized-runtime-env-context=JSON --language=PYTHON ARGUMENTS
    python worker_setup.py --fork=SOCKET .../default_worker.py ARGUMENTS           as `py_executable`, from Ray's program

With a socket it asks a template for the worker (`fork_server.py`), and ends with it. Becomes Ray's program if the runtime
environment asks for more than variables and this. It imports little, to start in milliseconds.
"""

import importlib.util
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence

CONTEXT, LANGUAGE, FORK = "--serialized-runtime-env-context=", "--language=", "--fork="
PLAIN: dict[str, object] = {
    "command_prefix": [],
    "override_worker_entrypoint": None,
    "java_jars": [],
    "py_executable": sys.executable,
}

STARTED = b"started"  # a template's answer from the worker; any other says why there is none


def main() -> None:
    """Becomes the worker, or waits for its end."""
    words = sys.argv[1:]
    if words[0].startswith(FORK):
        become(words[1:], os.environ, words[0].removeprefix(FORK))
    context = json.loads(next((word.removeprefix(CONTEXT) for word in words if word.startswith(CONTEXT)), "") or "{}")
    variables = context.pop("env_vars", None) or {}
    executable, _, name = str(context.get("py_executable", "")).partition(f" {__file__} {FORK}")
    if name:
        context["py_executable"] = executable
    plain = all(value in (None, PLAIN.get(key)) for key, value in context.items())
    if plain and f"{LANGUAGE}PYTHON" in words and "$" not in "".join(variables.values()):
        become([word for word in words if not word.startswith((CONTEXT, LANGUAGE))], {**os.environ, **variables}, name)
    spec = importlib.util.find_spec("ray")  # without importing it
    assert spec is not None and spec.origin is not None
    rays = os.path.join(os.path.dirname(spec.origin), "_private", "workers", "setup_worker.py")
    os.execv(sys.executable, [sys.executable, rays, *words])  # noqa: S606


def become(words: Sequence[str], environment: Mapping[str, str], template: str) -> None:
    """Becomes the program `words`, unless `template` (a socket's name, or empty) forks it: then ends after it."""
    if template:
        reason = wait_for_fork(words, environment, template)
        print(f"not forked: {reason}", file=sys.stderr)  # noqa: T201  # goes to Ray's log
    os.execve(sys.executable, [sys.executable, *words], environment)  # noqa: S606


def wait_for_fork(words: Sequence[str], environment: Mapping[str, str], template: str) -> str:
    """Has `words` run in a fork of the template, with the files and the place of this process, which ends after it.

    Returns why it was not forked.
    """
    request = {"words": words, "environment": dict(environment), "directory": os.getcwd(), "group": os.getpgrp()}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{template}")
            if not same_user(connection):
                return "another user has the template's name"
            socket.send_fds(connection, [b"\0"], [0, 1, 2])
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1 << 16)
            if answer == STARTED:
                connection.recv(1)  # at the worker's end
                os._exit(0)
    except OSError as error:
        return str(error)
    return answer.decode() or "the template has ended"


def same_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end of a Unix socket is of this user."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


if __name__ == "__main__":
    main()
