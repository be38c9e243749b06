"""Forks Ray's workers from processes that have imported what they need: once, and while the run is checked.

    driver      `ForkServer`                        binds a socket for each kind of worker, and starts the server
    server      python -m dagrl.run.fork_server     imports torch, and forks a template for each kind
    template                                        imports the kind's libraries, and forks a worker for each request
    Ray         worker_setup.py --fork=SOCKET       passes its arguments, environment and files, and waits for the worker

A process can be forked until it has threads or uses CUDA. A template that does refuses, and the process that Ray started
becomes the worker itself, as without a server. Server and templates end with the driver, workers as any of Ray's. The driver
itself has checks that need torch called in forks, and never imports it.
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
import sys
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple, TypeVar, cast

from dagrl.errors import RunError
from dagrl.run.worker_setup import FORK, STARTED, same_user
from dagrl.runtime.garbage import gc_paused

T = TypeVar("T")

CALLS = "calls"
"""The kind of process for `ForkServer.call`."""

CUDA_DEVICE = "nvidia-uvm"
"""Device file that is open in a process that has started CUDA."""

NVML_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Makes `torch.cuda.is_available()` ask NVML, which does not start CUDA."""


SHELL = ("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL")
"""Variables that a shell changes all the time."""


class Kind(NamedTuple):
    """A kind of worker: what imports its libraries, which can be pickled, and the environment of its process."""

    load: Callable[[], object]
    environment: Mapping[str, str]


class ForkServer:
    """The server of a run on this machine: a new one, or with `idle_s` one that an earlier run has left.

    It ends `idle_s` after the last run that has used it, however that ended. Only what dagrl itself imports is left.
    """

    def __init__(self, kinds: Mapping[str, Kind], idle_s: float = 0.0) -> None:
        self._shared = dict(sorted(set.intersection(*(set(kind.environment.items()) for kind in kinds.values()))))
        every = {**kinds, CALLS: Kind(gc.collect, self._shared)}
        pickled = {role: pickle.dumps((kind.load, sorted(kind.environment.items()))) for role, kind in every.items()}
        self._idle_s = idle_s if all(map(_is_ours, kinds.values())) else 0.0
        key = _key(pickled.values()) if self._idle_s else uuid.uuid4().hex
        names = {kind: f"dagrl-{key}-{sha256(kind).hexdigest()[:16]}" for kind in pickled.values()}
        self._names = {role: names[kind] for role, kind in pickled.items()}
        self._process: Popen[bytes] | None = None
        self._lease = socket.socket(socket.AF_UNIX)  # closed by the end of this process, too
        try:
            self._lease.connect(f"\0dagrl-{key}")
        except ConnectionRefusedError:
            self._start(f"dagrl-{key}", names)

    def _start(self, control: str, names: Mapping[bytes, str]) -> None:
        with ExitStack() as stack:
            listeners = {name: stack.enter_context(socket.socket(socket.AF_UNIX)) for name in (control, *names.values())}
            for name, listener in listeners.items():
                listener.bind(f"\0{name}")  # of Linux's abstract namespace: no file that could remain
                listener.listen()
            self._lease.connect(f"\0{control}")
            self._process = Popen(  # noqa: S603
                [sys.executable, "-m", __name__],
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                env={**os.environ, **self._shared},
                pass_fds=[listener.fileno() for listener in listeners.values()],
                process_group=0,  # a terminal's signals are for the driver
            )
            assert self._process.stdin is not None
            templates = [(listeners[name].fileno(), kind) for kind, name in names.items()]
            with suppress(BrokenPipeError), self._process.stdin as spec:  # it has ended: nothing is forked
                pickle.dump((listeners[control].fileno(), self._idle_s, templates), spec)
            self._process.stdin = None

    def refusals(self) -> str:
        """Returns why templates that this process has started refused by now to fork workers; empty if none has."""
        if self._process is None:
            return ""
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        return (self._process.stdout.read() or b"").decode().strip()

    def executable(self, role: str) -> str | None:
        """Returns the `py_executable` of the role's workers; None if it has no kind."""
        return " ".join(self._words(role)) or None

    def _words(self, role: str) -> list[str]:
        setup, name = str(Path(__file__).with_name("worker_setup.py")), self._names.get(role)
        return [] if name is None else [sys.executable, setup, f"{FORK}{name}"]

    def call(self, function: Callable[..., T], *arguments: object) -> Callable[[], T]:
        """Begins `function(*arguments)` in a process that has torch and transformers. Returns what waits for its result.

        All of it is pickled. Raises what the function raises.
        """
        words = [*self._words(CALLS), str(Path(__file__).with_name("call.py"))]
        environment = {**os.environ, **self._shared}
        process = Popen(words, stdin=PIPE, stdout=PIPE, env=environment)  # noqa: S603
        call = pickle.dumps((sys.path, pickle.dumps((function, arguments))))

        def result() -> T:
            answer, _ = process.communicate()
            if not answer:
                raise RunError(f"the process of {function.__name__} ended with {process.returncode} before its result")
            value, error = pickle.loads(answer)  # noqa: S301
            if error is not None:
                raise error
            return cast("T", value)

        assert process.stdin is not None
        with process.stdin, suppress(BrokenPipeError):
            process.stdin.write(call)
        process.stdin = None
        return result

    def end(self) -> None:
        """Ends the server and its templates, or leaves them for `idle_s`. Workers live on."""
        self._lease.close()
        if self._process is not None and not self._idle_s:
            with self._process, suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _is_ours(kind: Kind) -> bool:
    """Returns whether a kind imports by a function of dagrl."""
    function = kind.load.func if isinstance(kind.load, partial) else kind.load
    return function.__module__.startswith("dagrl.")


def _key(kinds: Iterable[bytes]) -> str:
    """Returns a name of all that the imports depend on, and of the session, in which alone a worker can join Ray's group."""
    sources = Path(__file__).parents[1].rglob("*.py")
    installed = (Path(path) for path in sys.path if path.endswith("-packages"))
    files = sorted((str(path), path.stat().st_mtime_ns) for path in (*sources, *installed) if path.exists())
    environment = sorted(item for item in os.environ.items() if item[0] not in SHELL)
    state = (sys.executable, sys.path, sorted(kinds), files, environment, os.getcwd(), os.getsid(0))
    return sha256(repr(state).encode()).hexdigest()


def _serve() -> None:
    """Runs the server until no run has used it for a while. Returns in a worker, at its end."""
    file, idle_s, templates = pickle.load(sys.stdin.buffer)  # noqa: S301
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with gc_paused():  # what all kinds import
        import transformers.models.auto.modeling_auto  # noqa: F401
    server, held = os.pipe()  # only the server has `held`: the other end is readable when it has ended
    for mine, kind in templates:
        if os.fork() == 0:
            for other in (held, file, *(other for other, _ in templates if other != mine)):
                os.close(other)
            _run_template(socket.socket(fileno=mine), kind, server)
            return
    for template, _ in templates:
        os.close(template)
    control, runs = socket.socket(fileno=file), list[socket.socket]()
    while ready := select.select([control, *runs], [], [], None if runs else idle_s)[0]:
        for connection in ready:
            if connection is control:
                runs.append(control.accept()[0])
            else:  # the run has ended
                runs.remove(connection)
                connection.close()
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
                with suppress(OSError):  # the driver, or Ray's process, has ended
                    connection.sendall(refusal.encode())
                    print(refusal, flush=True)  # noqa: T201  # to the driver
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
    if not same_user(connection):
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
            load, items = pickle.loads(kind)  # noqa: S301
            variables = dict(items)
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
