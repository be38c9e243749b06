"""Forks Ray's workers from processes that have imported what they need: once, and while the run is checked.

    driver      `ForkServer`                        binds a socket for each kind of worker, and starts the server
    server      python -m dagrl.run.fork_server     imports torch, and forks a template for each kind
    template                                        imports the kind's libraries, and forks a worker for each request
    Ray         worker_setup.py --fork=SOCKET       passes its arguments, environment and files, and waits for the worker

A process can be forked until it has threads or uses CUDA. A template that does refuses, and the process that Ray started
becomes the worker itself, as without a server. Server and templates end with the driver, workers as any of Ray's.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple

from dagrl.run.worker_setup import FORK, STARTED
from dagrl.runtime.garbage import gc_paused

CUDA_DEVICE = "nvidia-uvm"
"""Device file that is open in a process that has started CUDA."""

NVML_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Makes `torch.cuda.is_available()` ask NVML, which does not start CUDA."""


class Kind(NamedTuple):
    """A kind of worker: what imports its libraries, which can be pickled, and the environment of its process."""

    load: Callable[[], object]
    environment: Mapping[str, str]


class ForkServer:
    """The server of a run on this machine, started by the constructor. It ends by `end`, or with this process."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        pickled = {role: pickle.dumps((kind.load, dict(kind.environment))) for role, kind in kinds.items()}
        listeners = {kind: _listen() for kind in set(pickled.values())}
        files = [listener.fileno() for listener in listeners.values()]
        shared = set.intersection(*(set(kind.environment.items()) for kind in kinds.values()))
        self._names = {role: listeners[kind].getsockname()[1:].decode() for role, kind in pickled.items()}
        self._process = Popen(  # noqa: S603
            [sys.executable, "-m", __name__],
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={**os.environ, **dict(shared)},
            pass_fds=files,
            process_group=0,  # a terminal's signals are for the driver
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: nothing is forked
            pickle.dump(list(zip(files, listeners, strict=True)), self._process.stdin)
            self._process.stdin.flush()
        for listener in listeners.values():
            listener.close()

    def refusals(self) -> str:
        """Returns why templates have refused by now to fork workers; empty if none has."""
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        return (self._process.stdout.read() or b"").decode().strip()

    def executable(self, role: str) -> str | None:
        """Returns the `py_executable` of the role's workers; None if it has no kind."""
        setup, name = Path(__file__).with_name("worker_setup.py"), self._names.get(role)
        return None if name is None else f"{sys.executable} {setup} {FORK}{name}"

    def end(self) -> None:
        """Ends the server and its templates. Workers live on."""
        with self._process, suppress(ProcessLookupError, BrokenPipeError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _listen() -> socket.socket:
    """Returns a listening socket of Linux's abstract namespace, which is no file that could remain."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0dagrl-{uuid.uuid4().hex}")
    listener.listen()
    return listener


def _serve() -> None:
    """Runs the server until the driver ends. Returns in a worker, at its end."""
    templates: Sequence[tuple[int, bytes]] = pickle.load(sys.stdin.buffer)  # noqa: S301
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with gc_paused():
        import torch  # noqa: F401
    server, held = os.pipe()  # only the server has `held`: the other end is readable when it has ended
    for file, kind in templates:
        if os.fork() == 0:
            os.close(held)
            for other, _ in templates:
                if other != file:
                    os.close(other)
            _run_template(socket.socket(fileno=file), kind, server)
            return
    for file, _ in templates:
        os.close(file)
    sys.stdin.buffer.read()
    os._exit(0)


def _run_template(listener: socket.socket, kind: bytes, server: int) -> None:
    """Imports, and forks workers until the server ends. Returns in a worker, at its end."""
    imports = _load(kind)
    while server not in select.select([listener.fileno(), server], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            files, request = _read_request(connection)
            different = sorted(dict(imports.variables.items() - request["environment"].items())) if request else ()
            refusal = imports.refusal or (f"the imports had other values of {different}" if different else "")
            if refusal:
                print(refusal, flush=True)  # noqa: T201  # to the driver
                with suppress(OSError):  # Ray's process has ended
                    connection.sendall(refusal.encode())
            elif request and os.fork() == 0:
                os.close(server)
                listener.close()
                connection.sendall(STARTED)
                connection.detach()  # open until this process ends
                request["environment"] |= imports.changed
                _become(files, **request)
                return
            for file in files:
                os.close(file)
    os._exit(0)


def _read_request(connection: socket.socket) -> tuple[Sequence[int], dict[str, Any]]:
    """Returns the files and the request of one of this user's processes; none of another's: the sockets have no modes."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        return (), {}
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    words = b"".join(iter(partial(connection.recv, 1 << 16), b""))
    return files, json.loads(words) if words else {}


class _Imports(NamedTuple):
    """Why this process must not be forked, if so; the environment of the imports; and what they changed in it."""

    refusal: str
    variables: Mapping[str, str]
    changed: Mapping[str, str] = {}


def _load(kind: bytes) -> _Imports:
    """Imports the libraries of a kind."""
    before, variables = dict(os.environ), dict[str, str]()
    sys.modules["ray"] = None  # type: ignore[assignment]  # when imported it reads settings, which a worker has of its own
    try:
        with gc_paused():
            load, variables = pickle.loads(kind)  # noqa: S301
            os.environ.update(variables | NVML_CHECK)
            load()
    except Exception:  # the worker will raise it again
        return _Imports(traceback.format_exc(), variables)
    finally:
        del sys.modules["ray"]
    changed = {name: value for name, value in os.environ.items() if (before | variables).get(name) != value}
    gc.freeze()
    if threads := len(os.listdir("/proc/self/task")) - 1:
        return _Imports(f"the imports started {threads} threads", variables)
    if any(CUDA_DEVICE in os.path.realpath(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd")):
        return _Imports("the imports started CUDA", variables)
    return _Imports("", variables, changed)


def _become(files: Sequence[int], words: Sequence[str], environment: Mapping[str, str], directory: str, group: int) -> None:
    """Runs Ray's program `words` in this process, with the files and in the place of the process that asked for it."""
    os.setpgid(0, group)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv, sys.path[0] = list(words), os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
