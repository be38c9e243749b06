"""Processes that are shared by integration tests because they are slow to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.vllm_ranks import Ranks


@pytest.fixture(scope="session")
def vllm_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes for vLLM engines."""
    pytest.importorskip("vllm")
    from tests.integration.vllm_models import make_config
    from workers.vllm import VllmWorker

    ranks = Ranks(VllmWorker.environment(make_config(tmp_path_factory.mktemp("vllm"))))
    yield ranks
    ranks.close()
