"""Forks Ray's workers from processes that have imported what they need: once, and while the run is checked.

    driver      `ForkServer`                        binds a socket for each kind of worker, and starts the server
    server      python -m dagrl.run.fork_server     imports what all need, and forks a template for each kind
    template                                        imports the kind's libraries, and forks a worker for each request
    Ray         worker_setup.py --fork=SOCKET       passes its arguments, environment and files, and waits for the worker

A process can be forked until it has threads that matter, or uses CUDA. A template that does refuses, and the process that
Ray started becomes the worker itself, as without a server. Server and templates end with the driver, workers as any of
Ray's. The driver itself has checks that need torch called in forks, and never imports it.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import logging
import os
import pickle
import resource
import runpy
import select
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

from dagrl.attributes import setting
from dagrl.errors import DeadlineError, RunError
from dagrl.imports import UNUSED, brief_imports
from dagrl.machine import gpu_count
from dagrl.run.worker_setup import FORK, STARTED, same_user

if TYPE_CHECKING:
    from dagrl.config.run import ClusterConfig

T = TypeVar("T")

PREFIX = f"dagrl-{os.getuid()}-"  # the beginning of the names of the sockets of this user's servers
CALLS = "calls"  # the kind of process for `ForkServer.call`

GPU_DEVICES = "/dev/nvidia"
"""The beginning of the names of device files. One is open in a process that has started CUDA."""

HARMLESS = ("jemalloc_bg_thd", "cuda0")
"""The beginnings of the names of threads that a fork may lose: that of pyarrow's allocator, which handles forks, and one of
NVML, which stays after NVML is shut down."""

SETTLE_S, POLL_S = 1.0, 0.02
"""Seconds in which threads of the imports may end, or name themselves: until then they have the process's name."""

COMMON = ("torch", "transformers.models.auto.modeling_auto", "dagrl.config")  # what all kinds import
MOST_FILES = 1 << 16  # files that a process may have open, if the system lets it: as many as `ray.init` asks for
MOST_KINDS = 250  # files that a message between processes may carry: `SCM_MAX_FD` in Linux's `unix(7)` is 253
PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h

SHELL = ("_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL")  # variables that a shell changes all the time


class Kind(NamedTuple):
    """A kind of worker: what imports its libraries, which can be pickled, and the environment of its process."""

    load: Callable[[], object]
    environment: Mapping[str, str]


class Server:
    """A server, which imports `common` until `serve` gives it its kinds. It ends with this process, and as a context manager
    with the block, unless it `stays` for other runs: then as `serve` says."""

    def __init__(self, common: Sequence[str] = COMMON) -> None:
        self.stays = False
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))  # what it forks inherits it
        self.pipe, theirs = socket.socketpair()
        with theirs:
            self.process = Popen(  # noqa: S603
                [sys.executable, "-m", __name__, *common],
                stdin=theirs.fileno(),
                stdout=PIPE,
                stderr=DEVNULL,
                env={**os.environ, **base_environment()},
                process_group=0,  # a terminal's signals are for the driver
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.stays:
            self.kill()

    def serve(self, control: socket.socket, kinds: Mapping[bytes, socket.socket], idle_s: float) -> None:
        """Forks templates of `kinds`, with their sockets, and stays for `idle_s` after the last connection to `control`."""
        self.stays = idle_s > 0
        files = [listener.fileno() for listener in (control, *kinds.values())]
        with suppress(BrokenPipeError), self.pipe:  # it has ended: nothing is forked
            socket.send_fds(self.pipe, [b"\0"], files)
            self.pipe.sendall(pickle.dumps((idle_s, list(kinds))))

    def kill(self) -> None:
        """Ends the server and its templates."""
        self.pipe.close()
        with self.process, suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def forks_here(cluster: ClusterConfig) -> bool:
    """Whether a run forks its workers: on a machine of its own, not on the nodes of a running cluster."""
    return cluster.address is None and sys.platform == "linux"


def some_server() -> bool:
    """Returns whether this user has a server on this machine, of a run or left by one. It may have other imports."""
    return f"@{PREFIX}" in Path("/proc/net/unix").read_text()


def base_environment() -> dict[str, str]:
    """Returns the variables of the server, which those of every kind contain."""
    return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


class ForkServer:
    """What forks the workers of a run on this machine: `server`, else one that an earlier run has left, or a new one.

    It ends `idle_s` after the last run that has used it, however that ended. Only what dagrl itself imports is left.
    `call_s`: seconds that a call may take (None: any number).
    """

    def __init__(
        self, kinds: Mapping[str, Kind], idle_s: float = 0.0, server: Server | None = None, call_s: float | None = None
    ) -> None:
        every = {**kinds, CALLS: Kind(_import_checks, base_environment())}
        pickled = {role: pickle.dumps((kind.load, sorted(kind.environment.items()))) for role, kind in every.items()}
        self._idle_s = idle_s if all(map(_is_ours, kinds.values())) else 0.0
        key = _key(pickled.values()) if self._idle_s else uuid.uuid4().hex
        names = {kind: f"{PREFIX}{key}-{sha256(kind).hexdigest()[:16]}" for kind in pickled.values()}
        self._names = {role: names[kind] for role, kind in pickled.items()}
        self._server = server
        self._calls: list[Popen[bytes]] = []
        self._call_s = call_s
        self._lease = socket.socket(socket.AF_UNIX)  # closed by the end of this process, too
        until = time.monotonic() + SETTLE_S
        while self._lease.connect_ex(f"\0{PREFIX}{key}"):
            try:
                self._start(f"{PREFIX}{key}", names)
            except OSError as error:  # another run starts it at this moment
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise
                time.sleep(POLL_S)
            else:
                return
        if server is not None:
            server.kill()
            self._server = None

    def _start(self, control: str, names: Mapping[bytes, str]) -> None:
        with ExitStack() as stack:
            listeners = {name: stack.enter_context(socket.socket(socket.AF_UNIX)) for name in (control, *names.values())}
            for name, listener in listeners.items():
                listener.bind(f"\0{name}")  # of Linux's abstract namespace: no file that could remain
                listener.listen()
            self._lease.connect(f"\0{control}")
            self._server = self._server or Server()
            self._server.serve(listeners[control], {kind: listeners[name] for kind, name in names.items()}, self._idle_s)

    def refusals(self) -> str:
        """Returns why templates that this process has started refused by now to fork workers; empty if none has."""
        if self._server is None:
            return ""
        output = self._server.process.stdout
        assert output is not None
        os.set_blocking(output.fileno(), False)
        return (output.read() or b"").decode().strip()

    def executable(self, role: str) -> str | None:
        """Returns the `py_executable` of the role's workers; None if it has no kind."""
        return " ".join(self._words(role)) or None

    def _words(self, role: str) -> list[str]:
        setup, name = str(Path(__file__).with_name("worker_setup.py")), self._names.get(role)
        return [] if name is None else [sys.executable, setup, f"{FORK}{name}"]

    def call(self, function: Callable[..., T], *arguments: object) -> Callable[[], T]:
        """Begins `function(*arguments)` in a process that has torch and transformers. Returns what waits for its result.

        All of it is pickled; what it logs is logged here. Raises what the function raises, and DeadlineError if it takes
        longer than `call_s`.
        """
        words = [*self._words(CALLS), str(Path(__file__).with_name("call.py"))]
        environment = {**os.environ, **base_environment()}
        process = Popen(words, stdin=PIPE, stdout=PIPE, env=environment, process_group=0)  # noqa: S603
        self._calls.append(process)
        call = pickle.dumps((sys.path, pickle.dumps((function, arguments))))

        begin = time.monotonic()

        def result() -> T:
            try:
                answer, _ = process.communicate(timeout=self._call_s and max(0.0, begin + self._call_s - time.monotonic()))
            except TimeoutExpired as late:
                raise DeadlineError(
                    f"{function.__name__} has not ended within {self._call_s:g} s, with its imports; is this machine "
                    "overloaded? To wait longer: timeouts.start_s"
                ) from late
            if not answer:
                raise RunError(f"the process of {function.__name__} ended with {process.returncode} before its result")
            value, error, records = pickle.loads(answer)  # noqa: S301
            for record in records:
                if (logger := logging.getLogger(record.name)).isEnabledFor(record.levelno):
                    logger.handle(record)
            if error is not None:
                raise error
            return cast("T", value)

        assert process.stdin is not None
        with process.stdin, suppress(BrokenPipeError):
            process.stdin.write(call)
        process.stdin = None
        return result

    def end(self) -> None:
        """Ends calls, the server and its templates, or leaves these for `idle_s`. Workers live on."""
        for process in self._calls:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._lease.close()
        if self._server is not None and not self._idle_s:
            self._server.kill()


def _import_checks() -> None:
    import dagrl.rl.losses
    import dagrl.run.preflight  # noqa: F401


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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    _end_with_parent(signal.SIGKILL)  # also while it imports
    with brief_imports(*UNUSED):
        for module in sys.argv[1:]:
            with gpus_unasked():
                importlib.import_module(module)
        gc.freeze()
    with socket.socket(fileno=os.dup(0)) as pipe:
        _, (control_file, *files), _, _ = socket.recv_fds(pipe, 1, MOST_KINDS)
        words = b"".join(iter(partial(pipe.recv, 1 << 16), b""))
    idle_s, kinds = pickle.loads(words)  # noqa: S301
    if idle_s:
        _end_with_parent(0)
    server, held = os.pipe()  # only the server has `held`: the other end is readable when it has ended
    for file, kind in zip(files, kinds, strict=True):
        if os.fork() == 0:
            _end_with_parent(signal.SIGKILL)
            for other in (held, control_file, *(other for other in files if other != file)):
                os.close(other)
            _run_template(socket.socket(fileno=file), kind, server, kept=idle_s > 0)
            return
    for file in files:
        os.close(file)
    control, runs = socket.socket(fileno=control_file), list[socket.socket]()
    while ready := select.select([control, *runs], [], [], None if runs else idle_s)[0]:
        for connection in ready:
            if connection is control:
                runs.append(control.accept()[0])
            else:  # the run has ended
                runs.remove(connection)
                connection.close()
    os._exit(0)


def _end_with_parent(number: int) -> None:
    """Has Linux send this process a signal (0: none) when the thread that started it ends. Forks do not inherit it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _run_template(listener: socket.socket, kind: bytes, server: int, *, kept: bool) -> None:
    """Imports, and forks workers until the server ends. Returns in a worker, at its end.

    `kept`: for other runs, too, for which files that have been imported may change.
    """
    imports = _load(kind)
    sources = _imported_files() if kept else {}
    while server not in select.select([listener.fileno(), server], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            files, request = _read_request(connection)
            different = sorted(dict(imports.variables.items() - request["environment"].items())) if request else ()
            refusal = imports.refusal or (f"the imports had other values of {different}" if different else "")
            if kept and (changed := sorted(dict(sources.items() - _imported_files().items()))):
                refusal = refusal or f"since the imports, {changed[0]} has changed"
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


def _imported_files() -> dict[str, int]:
    """Returns when each file of the imported modules was changed, in nanoseconds; nothing of files that are gone."""
    times = {}
    for module in list(sys.modules.values()):
        with suppress(OSError, TypeError, KeyError):  # modules without a file, and what is no module
            file = vars(module)["__file__"]
            times[file] = os.stat(file).st_mtime_ns
    return times


class _Imports(NamedTuple):
    """Why this process must not be forked, if so; the environment of the imports; and what they changed in it."""

    refusal: str
    variables: Mapping[str, str]
    changed: Mapping[str, str] = {}


def _load(kind: bytes) -> _Imports:
    """Imports the libraries of a kind."""
    before, variables = dict(os.environ), dict[str, str]()
    try:
        # Ray reads settings when it is imported, and a worker has settings of its own.
        with gpus_unasked(), brief_imports("ray"):
            load, items = pickle.loads(kind)  # noqa: S301
            variables = dict(items)
            os.environ.update(variables)
            load()
            gc.freeze()
    except Exception:  # the worker will raise it again
        return _Imports(traceback.format_exc(), variables)
    changed = {name: value for name, value in os.environ.items() if (before | variables).get(name) != value}
    return _Imports(_why_not_to_fork(), variables, changed)


def _why_not_to_fork() -> str:
    """Returns what of this process a fork would break; empty if nothing."""
    files = {os.path.realpath(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd")}
    if opened := sorted(file for file in files if file.startswith(GPU_DEVICES)):
        return f"the imports opened {', '.join(opened)}"
    until = time.monotonic() + SETTLE_S
    while (threads := _threads()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return f"the imports started the threads {', '.join(threads)}" if threads else ""


def _threads() -> list[str]:
    """Returns the names of the threads that a fork would lose, but for the harmless ones."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            if int(task) != os.getpid():
                names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return [name for name in names if not name.startswith(HARMLESS)]


@contextmanager
def gpus_unasked() -> Iterator[None]:
    """Has torch, once imported, count GPUs without NVML in the block, which would open their files and start a thread."""
    if (torch := sys.modules.get("torch")) is None:
        yield
        return
    with setting(torch.cuda, is_available=lambda: gpu_count() > 0, device_count=gpu_count):
        yield


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
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() == 1:
        # A fork loses a pool that an import has made. Torch would make it again on its next use, without a lock: in the
        # threads of autograd, one for each GPU. With a pool of more threads a template does not fork.
        torch.set_num_threads(1)
    sys.argv, sys.path[0] = list(words), os.path.dirname(words[0])
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
