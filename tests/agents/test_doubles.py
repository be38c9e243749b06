"""The doubles of CI have the signatures of the real packages (make test-agents)."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

DOUBLES = Path(__file__).parents[1] / "unit" / "rl" / "doubles"
PAIRS = (
    ("verifiers.envs.environment", "verifiers", "Environment", ("run_rollout", "get_dataset")),
    ("verifiers.clients", "verifiers.clients", "Client", ("get_response",)),
    ("openenv.core.generic_client", "openenv.core.generic_client", "GenericEnvClient", ("reset", "step")),
)


def names(module: str, owner: str, method: str) -> list[str]:
    found = getattr(getattr(importlib.import_module(module), owner), method)
    return list(inspect.signature(found).parameters)


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("verifiers", "openenv")]:
        del sys.modules[name]


def test_doubles_have_the_signatures_of_the_real_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers")
    pytest.importorskip("openenv")
    real = {(owner, method): names(module, owner, method) for module, _, owner, methods in PAIRS for method in methods}
    monkeypatch.syspath_prepend(str(DOUBLES))
    forget()
    try:
        made = {(owner, method): names(module, owner, method) for _, module, owner, methods in PAIRS for method in methods}
    finally:
        forget()
    assert made == real
