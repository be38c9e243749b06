"""Workers forked from templates: whose place they take, and what must not be forked."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dagrl.errors import DeadlineError
from dagrl.machine import cpu_count
from dagrl.run.fork_server import ForkServer, Kind, Server, base_environment
from tests.integration.processes import ends_within

PROGRAM = """
import json, os, sys
print(json.dumps({
    "words": sys.argv, "name": __name__, "pid": os.getpid(), "parent": os.getppid(), "directory": os.getcwd(),
    "group": os.getpgrp(), "imported": "colorsys" in sys.modules, "variable": os.environ.get("LATE"),
    "changed": os.environ.get("CHANGED"),
    "input": sys.stdin.read(),
}))
"""


def _import() -> None:
    import colorsys  # noqa: F401

    os.environ["CHANGED"] = "by an import"


def _start_thread(name: str = "reader") -> None:
    def sleep() -> None:
        time.sleep(0.2)  # until then it has the name of its process
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        time.sleep(60)

    threading.Thread(target=sleep, daemon=True).start()


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    variables = {"KIND": "1", **base_environment()}
    server = ForkServer(
        {
            "train": Kind(_import, variables),
            "critic": Kind(_import, variables),
            "generation": Kind(_start_thread, variables),
            "allocating": Kind(partial(_start_thread, "jemalloc_bg_thd"), variables),
        },
        server=Server(common=()),
    )
    yield server
    server.end()


def _run(server: ForkServer, role: str, directory: Path, **variables: str) -> tuple[dict[str, Any], int, str]:
    program = directory / "program.py"
    program.write_text(PROGRAM)
    command = [*str(server.executable(role)).split(), str(program), "--word"]
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, **base_environment(), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate("given", timeout=60)
    assert process.returncode == 0, errors
    return json.loads(output), process.pid, errors


def test_a_fork_takes_the_place_of_the_process_that_asks(server: ForkServer, tmp_path: Path) -> None:
    told, asking, errors = _run(server, "train", tmp_path, KIND="1", LATE="yes")
    assert told["pid"] != asking and told["imported"] and not errors
    assert told["words"] == [str(tmp_path / "program.py"), "--word"] and told["name"] == "__main__"
    assert told["directory"] == str(tmp_path) and told["variable"] == "yes" and told["input"] == "given"
    assert told["changed"] == "by an import"
    assert told["group"] == os.getpgrp()
    assert _run(server, "allocating", tmp_path, KIND="1")[0]["pid"] != asking
    again, _, _ = _run(server, "critic", tmp_path, KIND="1")
    assert again["parent"] == told["parent"] and again["variable"] is None


@pytest.mark.parametrize(
    ("role", "kind", "reason"),
    [("train", "2", "other values of ['KIND']"), ("generation", "1", "started the threads reader")],
)
def test_what_cannot_be_forked_runs_by_itself(server: ForkServer, role: str, kind: str, reason: str, tmp_path: Path) -> None:
    told, asking, errors = _run(server, role, tmp_path, KIND=kind)
    assert told["pid"] == asking and not told["imported"] and reason in errors
    assert reason in server.refusals() and not server.refusals()


def test_functions_are_called_where_torch_is(server: ForkServer, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    server.call(logging.getLogger("dagrl.told").warning, "%s of two", 1)()
    assert ("dagrl.told", logging.WARNING, "1 of two") in caplog.record_tuples
    parts = server.call(divmod, 7, 2)
    error = server.call(int, "x")
    assert parts() == (3, 1)
    with pytest.raises(ValueError, match="invalid literal"):
        error()
    monkeypatch.setattr(server, "_call_s", 0.1)
    with pytest.raises(DeadlineError, match=r"sleep has not ended within 0\.1 s, .* timeouts\.start_s"):
        server.call(time.sleep, 60)()


def test_a_server_stays_for_the_next_run(tmp_path: Path) -> None:
    """Its imports are dagrl's: what others import may change."""
    variables = {"KIND": uuid.uuid4().hex}
    parents = []
    for _ in range(2):
        with Server(()) as started:
            server = ForkServer({"train": Kind(cpu_count, variables)}, idle_s=2.0, server=started)
            parents.append(_run(server, "train", tmp_path, **variables)[0]["parent"])
            server.end()
    assert len(set(parents)) == 1
    assert ends_within(30.0, lambda: psutil.pid_exists(parents[0]))
    foreign = [ForkServer({"train": Kind(_import, variables)}, idle_s=60, server=Server(())) for _ in range(2)]
    try:
        assert len({_run(server, "train", tmp_path, **variables)[0]["parent"] for server in foreign}) == 2
    finally:
        for server in foreign:
            server.end()


def test_a_server_that_stays_forks_no_old_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, library = {"KIND": uuid.uuid4().hex}, tmp_path / "library.py"
    library.write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    server = ForkServer({"train": Kind(cpu_count, variables)}, idle_s=0.1, server=Server(("library",)))
    told, asking, errors = _run(server, "train", tmp_path, **variables)
    assert told["pid"] != asking and not errors
    os.utime(library, ns=(0, 1))
    told, asking, errors = _run(server, "train", tmp_path, **variables)
    assert told["pid"] == asking and f"since the imports, {library} has changed" in errors
    server.end()


def test_without_its_server_a_worker_runs_by_itself(tmp_path: Path) -> None:
    server = ForkServer({"train": Kind(_import, {})}, server=Server(()))
    server.end()
    told, asking, errors = _run(server, "train", tmp_path)
    assert told["pid"] == asking and "not forked" in errors


def test_a_server_ends_with_its_driver() -> None:
    mark, place = uuid.uuid4().hex, "import gc, os; from dagrl.run.fork_server import ForkServer, Kind, Server"
    start = "ForkServer({'train': Kind(gc.collect, {})}, server=Server(()))"
    program = f"{place}; {start}; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "MARK": mark}, check=False)

    def marked() -> bool:
        environments = [process.info["environ"] or {} for process in psutil.process_iter(["environ"])]
        return any(environment.get("MARK") == mark for environment in environments)

    assert ends_within(30.0, marked)
