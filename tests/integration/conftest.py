"""Fixtures shared by integration tests; each costs nothing until a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.main_job import Run
    from tests.integration.train_pool import WorkerPool
    from tests.integration.vllm_ranks import Ranks


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face checkpoints of every architecture that the train workers support, by name."""
    from tests.integration.megatron_reference import TinyModels

    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def pool(tiny_models: dict[str, Path]) -> Iterator[WorkerPool]:
    """Four processes in which train workers of any layout run, and `tiny_models` for them."""
    pytest.importorskip("megatron.core")
    from tests.integration.train_pool import WorkerPool

    pool = WorkerPool(models=tiny_models)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def vllm_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes that hold vLLM engines, one engine after the other."""
    pytest.importorskip("vllm")
    from dagrl.workers.vllm import VllmWorker
    from tests.integration.vllm_models import make_config
    from tests.integration.vllm_ranks import SOCKETS, Ranks

    environment = VllmWorker.environment(make_config(tmp_path_factory.mktemp("vllm")))
    ranks = Ranks({**environment, SOCKETS: str(tmp_path_factory.mktemp("sockets"))})
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The GRPO quickstart with half of its steps, run to its end by the compiled executor."""
    from tests.integration.main_job import GRPO, LEARNING, train

    return train(GRPO, tmp_path_factory.mktemp("main"), "learned", *LEARNING)
