"""Joining and starting a Ray cluster, importing ahead of its workers, and stopping a run by signals."""

import ctypes
import importlib
import importlib.util
import json
import os
import re
import resource
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray

from dagrl.config import ClusterConfig
from dagrl.errors import ConfigError, RunError, StopRequestedError
from dagrl.run import worker_setup
from dagrl.run.cluster import AUTH_MODE, check_open_files, check_ray_directory, ray_cluster
from dagrl.run.fork_server import PREFIX, ForkServer, Server, gpus_unasked
from dagrl.run.local_cluster import cluster_processes, lean_node, nodes_live
from dagrl.run.stop import ignoring_signals, keep_handlers, stop_on_signals


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_a_cluster_that_cannot_be_joined_may_ask_for_a_token(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own message does not say so, and `ray start` requires a token once a local cluster has created one."""
    monkeypatch.delenv(AUTH_MODE, raising=False)
    if mode is not None:
        monkeypatch.setenv(AUTH_MODE, mode)
    monkeypatch.setattr(ray, "init", MagicMock(side_effect=ConnectionError("Failed to connect")))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(RunError, match=rf"Ray could not join the cluster at {address}.*: Failed to connect") as raised:
            with ray_cluster(ClusterConfig(address=address)):
                pass
    assert ("set RAY_AUTH_MODE=token" in str(raised.value)) == (mode is None)


SLOW, FULL = "The current node timed out during startup.", "no space left on device"


@pytest.mark.parametrize(
    ("failures", "address", "calls"), [([SLOW], None, 2), ([SLOW] * 2, None, 2), ([FULL], None, 1), ([SLOW], "auto", 1)]
)
def test_a_node_too_slow_for_ray_is_started_again(failures: list[str], address: Any, calls: int, monkeypatch: Any) -> None:
    init = MagicMock(side_effect=[*map(Exception, failures), None])  # as Ray raises
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("dagrl.run.cluster.ProcessGroup", MagicMock)
    starts = nullcontext() if calls > len(failures) else pytest.raises(RunError, match=re.escape(failures[-1]))
    with starts, ray_cluster(ClusterConfig(address=address)):
        pass
    assert init.call_count == calls


@pytest.mark.parametrize(
    ("host", "beyond", "message"),
    [
        *((host, 0, "no Ray cluster answers at .*; start one there") for host in ("127.0.0.1", "127.0.0.2", "[::1]")),
        # its lower bits listen
        ("127.0.0.1", 65536, r"cluster.address is '127\.0\.0\.1:\d+'; expected a port of at most 65535"),
    ],
)
def test_an_address_at_which_nothing_listens(host: str, beyond: int, message: str) -> None:
    with socket.socket() as bound:
        bound.bind(("", 0))
        if beyond:
            bound.listen()
        address = f"{host}:{beyond + bound.getsockname()[1]}"
        with pytest.raises(ConfigError, match=message), ray_cluster(ClusterConfig(address=address)):
            pass


def test_a_cluster_named_by_a_variable_alone_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(ray, "init", MagicMock(side_effect=ConnectionError("Failed to connect")))
    monkeypatch.setattr("dagrl.run.cluster.ProcessGroup", MagicMock())
    with pytest.raises(RunError, match="could not start on this machine"), ray_cluster(ClusterConfig()):
        pass
    says = "RAY_ADDRESS is head:6379, but cluster.address is null: Ray starts on this machine. Set cluster.address=head:6379"
    assert says in caplog.text


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR"])
def test_a_directory_that_ray_cannot_use_names_the_variable(variable: str, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(AUTH_MODE, raising=False)
    check_ray_directory()
    monkeypatch.setenv(variable, f"/tmp/{'long' * 20}")  # noqa: S108
    with pytest.raises(ConfigError, match=rf"{variable} is '/tmp/longlong.* paths of \d+ bytes; the system takes 107"):
        check_ray_directory()
    monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", "/proc")
    with pytest.raises(ConfigError, match=r"HOME, where Ray writes ~/.ray/auth_token unless RAY_AUTH_MODE=disabled: cannot"):
        check_ray_directory()
    monkeypatch.setenv(AUTH_MODE, "disabled")
    check_ray_directory()
    monkeypatch.setenv(variable, "/proc")
    with pytest.raises(ConfigError, match=rf"{variable} \(Ray's directory\): cannot write in /proc"):
        check_ray_directory()


def test_without_private_parts_ray_starts_as_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("ray")  # itself needs them
    for module in ("ray._private.node", "ray._private.worker"):
        monkeypatch.setitem(sys.modules, module, None)
    with lean_node():
        assert cluster_processes() == [] and nodes_live()


WORKER = ["/ray/default_worker.py", "--node-ip-address=127.0.0.1"]


@pytest.mark.parametrize(
    ("context", "language", "light"),
    [
        ({"env_vars": {"A": "1"}, "command_prefix": [], "py_executable": sys.executable, "java_jars": []}, "PYTHON", True),
        ({"env_vars": {}, "override_worker_entrypoint": None}, "PYTHON", True),
        (None, "PYTHON", True),
        ({"env_vars": {"A": "${HOME}/1"}}, "PYTHON", False),
        ({"command_prefix": ["conda", "run"]}, "PYTHON", False),
        ({"py_executable": "/other/python"}, "PYTHON", False),
        ({"a_key_of_a_later_ray": "x"}, "PYTHON", False),
        ({}, "CPP", False),
    ],
)
def test_what_variables_cannot_say_needs_rays_program(context: Any, language: str, light: bool, monkeypatch: Any) -> None:
    given = [] if context is None else [worker_setup.CONTEXT + json.dumps(context)]
    words = [*WORKER, *given, worker_setup.LANGUAGE + language, "--last"]
    monkeypatch.setattr(sys, "argv", ["worker_setup.py", *words])
    become = MagicMock(side_effect=SystemExit)
    for name in ("execv", "execve"):
        monkeypatch.setattr(os, name, become)
    with pytest.raises(SystemExit):
        worker_setup.main()
    (_, command, *environment) = become.call_args.args
    if light:
        assert command == [sys.executable, *WORKER, "--last"]
        assert environment == [{**os.environ, **(context or {}).get("env_vars", {})}]
    else:
        program = Path(command[1])
        assert program.is_file() and program.name == "setup_worker.py"
        assert command[2:] == words and environment == []


@pytest.fixture
def release_lock() -> Callable[[], None]:
    """Releases the lock of `logging` as after a fork, with a signal at that moment."""
    code = "def _releaseLock():\n    signal.raise_signal(signal.SIGINT)\n    return True"
    names: dict[str, Any] = {"__name__": "logging", "signal": signal}
    exec(compile(code, "logging", "exec"), names)  # noqa: S102
    return names["_releaseLock"]  # type: ignore[no-any-return]


def wait(seconds: float = 5.0) -> None:
    for _ in range(int(seconds * 100)):
        time.sleep(0.01)


def test_the_first_signal_requests_a_stop_and_the_second_interrupts() -> None:
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StopRequestedError, match="resume=true"):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("handler", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)], ids=["shell", "nohup"])
def test_a_terminal_that_closes_requests_a_stop_once(handler: Any, stops: bool, request: Any, monkeypatch: Any) -> None:
    left: list[bool] = []
    request.addfinalizer(partial(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, handler)))
    monkeypatch.setattr("dagrl.run.stop._leave_terminal", lambda: left.append(True))  # that of the tests stays
    with stop_on_signals() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        assert stop.requested == bool(left) == stops


def test_a_signal_while_a_lock_is_released_interrupts_later(release_lock: Callable[[], None]) -> None:
    with stop_on_signals() as stop, pytest.raises(KeyboardInterrupt), stop.at_once():
        release_lock()
        wait()
    assert stop.requested
    with stop_on_signals() as stop:
        with stop.at_once():
            release_lock()
        wait(0.5)  # too late to interrupt
        assert stop.requested


def test_signal_handlers_removed_by_native_code_are_restored() -> None:
    with stop_on_signals() as stop:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # SIG_DFL: the next one would kill this process
        keep_handlers()
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        with ignoring_signals():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_imports_count_gpus_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    opens_nvml = MagicMock(side_effect=AssertionError("NVML was asked"))
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=opens_nvml, device_count=opens_nvml))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr("dagrl.run.fork_server.gpu_count", lambda: 2)
    with gpus_unasked():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    assert torch.cuda.is_available is torch.cuda.device_count is opens_nvml


def test_workers_may_open_as_many_files_as_the_system_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises the limit of what it starts itself, not of workers, which are forked."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 184))
    monkeypatch.setattr("resource.setrlimit", raised := MagicMock())
    monkeypatch.setattr("dagrl.run.fork_server.Popen", MagicMock())
    Server().pipe.close()
    raised.assert_called_once_with(resource.RLIMIT_NOFILE, (184, 184))
    check_open_files(3)
    with pytest.raises(ConfigError, match=r"may open 184 files \(`ulimit -Hn`\); each of 4 workers needs 192\. Raise"):
        check_open_files(4)


def test_runs_that_start_at_once_share_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has taken the name, and does not listen yet, when the other connects."""
    key = uuid.uuid4().hex
    monkeypatch.setattr("dagrl.run.fork_server._key", lambda _: key)
    ours = MagicMock()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0{PREFIX}{key}")
        Timer(0.03, other.listen).start()
        ForkServer({}, idle_s=1.0, server=ours).end()
        other.accept()[0].close()
    ours.kill.assert_called_once_with()
    ours.serve.assert_not_called()
