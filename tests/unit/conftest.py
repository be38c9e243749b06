"""Fails a unit test that starts Ray or a process. Such tests belong in tests/integration."""

import multiprocessing.process
import multiprocessing.util
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
import ray

STARTS = {
    "ray.init": (ray, "init"),
    "subprocess.Popen": (subprocess.Popen, "__init__"),
    "Process.start of multiprocessing": (multiprocessing.process.BaseProcess, "start"),
    "a helper process of multiprocessing": (multiprocessing.util, "spawnv_passfds"),
    "os.fork": (os, "fork"),
    "os.posix_spawn": (os, "posix_spawn"),
}


@pytest.fixture(scope="package", autouse=True)
def _no_processes() -> Iterator[None]:
    """Replaces what starts processes. A test may replace it again with a double."""
    with pytest.MonkeyPatch.context() as patch:
        for call, (owner, name) in STARTS.items():
            patch.setattr(owner, name, _refuse(call))
        patch.setattr("dagrl.cli.main._imports_begun", lambda *_: None)
        patch.setattr("ray.is_initialized", lambda: False)  # integration tests may have left theirs to this process
        patch.setattr("ray.shutdown", lambda: None)
        yield


@pytest.fixture
def cluster() -> None:
    """Hides the cluster of tests/conftest.py."""
    _refuse("ray.init")()


def _refuse(call: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail(f"{call} in tests/unit, where tests start no processes; move this test to tests/integration")

    return refuse
