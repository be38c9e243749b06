"""On a Ray without the private parts that starting a lean node uses, it starts as for everybody."""

from __future__ import annotations

import importlib
import sys

import pytest

from dagrl.run.local_cluster import cluster_processes, lean_node, nodes_live


def test_without_private_parts_ray_starts_as_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("ray")  # itself needs them
    for module in ("ray._private.node", "ray._private.worker"):
        monkeypatch.setitem(sys.modules, module, None)
    with lean_node():
        assert cluster_processes() == []
        assert nodes_live()
