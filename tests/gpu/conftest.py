"""Marks tests of GPUs, and skips those without enough of them; imports Transformer Engine before Megatron, as workers do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from dagrl.bench.gpu.jobs import TESTS_FOR_TWO
from dagrl.workers.megatron.cpu import import_engine

if TYPE_CHECKING:
    from tests.integration.train_pool import WorkerPool

if torch.cuda.is_available():
    import_engine()


@pytest.fixture(scope="module")
def pool(models: dict[str, Path]) -> Iterator[WorkerPool]:
    """Processes for train workers, one a GPU, at most eight."""
    from tests.integration.train_pool import WorkerPool

    pool = WorkerPool(min(torch.cuda.device_count(), 8), models)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny Hugging Face checkpoints by name."""
    from tests.integration.megatron_reference import TinyModels

    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels have marks of their own (kernels.py): Triton's interpreter runs them without a GPU."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.path.stem.endswith("_kernels"):
            needed = 1 + (item.path.stem.removeprefix("test_") in TESTS_FOR_TWO)
            item.add_marker(pytest.mark.gpu)
            item.add_marker(
                pytest.mark.skipif(torch.cuda.device_count() < needed, reason=f"needs {needed} GPU{'s' * (needed > 1)}")
            )
