"""Joining and starting a Ray cluster: the error for one that cannot be reached."""

from __future__ import annotations

from typing import NoReturn

import pytest
import ray

from dagrl.config import ClusterConfig
from dagrl.errors import RunError
from dagrl.run.cluster import AUTH_MODE, ray_cluster


def refuse(**_: object) -> NoReturn:
    raise ConnectionError("Failed to connect")


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_a_cluster_that_cannot_be_joined_may_ask_for_a_token(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own message does not say so, and `ray start` requires a token once a local cluster has created one."""
    monkeypatch.delenv(AUTH_MODE, raising=False)
    if mode is not None:
        monkeypatch.setenv(AUTH_MODE, mode)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(RunError, match=r"Ray could not join the cluster at host:6379.*: Failed to connect") as raised:
        with ray_cluster(ClusterConfig(address="host:6379")):
            pass
    assert ("set RAY_AUTH_MODE=token" in str(raised.value)) == (mode is None)
