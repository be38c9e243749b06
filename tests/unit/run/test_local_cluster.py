"""On a Ray without the private parts that starting a lean node uses, it starts as for everybody."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dagrl.run import worker_setup
from dagrl.run.local_cluster import cluster_processes, lean_node, nodes_live


def test_without_private_parts_ray_starts_as_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("ray")  # itself needs them
    for module in ("ray._private.node", "ray._private.worker"):
        monkeypatch.setitem(sys.modules, module, None)
    with lean_node():
        assert cluster_processes() == []
        assert nodes_live()


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
def test_only_what_variables_cannot_express_needs_rays_program(
    context: dict[str, Any] | None, language: str, light: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [] if context is None else [worker_setup.CONTEXT + json.dumps(context)]
    words = [*WORKER, *given, worker_setup.LANGUAGE + language, "--last"]
    became: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sys, "argv", ["worker_setup.py", *words])

    def become(*arguments: Any) -> None:
        became.append(arguments)
        sys.exit(0)

    for name in ("execv", "execve"):
        monkeypatch.setattr(os, name, become)
    with pytest.raises(SystemExit):
        worker_setup.main()
    ((_, command, *environment),) = became
    if light:
        assert command == [sys.executable, *WORKER, "--last"]
        assert environment == [{**os.environ, **(context or {}).get("env_vars", {})}]
    else:
        program = Path(command[1])
        assert program.is_file() and program.name == "setup_worker.py"
        assert command[2:] == words and environment == []
