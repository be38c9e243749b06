"""Loading a train checkpoint: all ranks make the same rounds, and each verifies a share of the files."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dagrl.errors import CheckpointError
from dagrl.workers.megatron import cpu
from dagrl.workers.megatron.manifest import fingerprint
from tests.unit.run.full_disk import full_disk

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core")


@pytest.fixture
def checkpoint() -> Any:
    cpu.adapt()
    from dagrl.workers.megatron import checkpoint

    return checkpoint


class Ranks:
    """A process group whose ranks are threads."""

    def __init__(self, checkpoint: Any, size: int) -> None:
        self._checkpoint = checkpoint
        self._barrier = threading.Barrier(size, timeout=30)
        self._told: dict[int, Any] = {}
        self._mine = threading.local()

    def gather(self, group: object, value: Any) -> list[Any]:
        self._told[self._mine.rank] = value
        self._barrier.wait()
        told = [self._told[rank] for rank in range(self._barrier.parties)]
        self._barrier.wait()
        return told

    def rounds(self, rank: int, targets: list[Any]) -> list[list[Any]]:
        self._mine.rank = rank
        return list(self._checkpoint._rounds(iter(targets), None))


def rounds_of(ranks: list[list[Any]], checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[list[Any]]]:
    """Returns the rounds of each rank, of at most 100 bytes each."""
    threads = Ranks(checkpoint, len(ranks))
    monkeypatch.setattr(checkpoint, "gather_objects", threads.gather)
    monkeypatch.setattr(checkpoint, "LOAD_BYTES", 100)
    monkeypatch.setattr(checkpoint.dist, "get_world_size", lambda: len(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(threads.rounds, range(len(ranks)), ranks))


def target(nbytes: int, into: torch.Tensor | None) -> Any:
    """A read into host memory that is copied `into` a piece, or directly into its target without one."""
    return SimpleNamespace(entry=SimpleNamespace(data=torch.empty(nbytes, dtype=torch.uint8)), into=into)


@pytest.mark.parametrize("counts", [(7, 2, 0), (0, 3), (3, 3)])
def test_all_ranks_load_in_equally_many_rounds_within_their_memory(
    counts: tuple[int, ...], checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with less to read join the remaining rounds with nothing."""
    ranks = [[target(1000, None), *(target(40, torch.empty(1)) for _ in range(count))] for count in counts]
    found = rounds_of(ranks, checkpoint, monkeypatch)
    assert len({len(rounds) for rounds in found}) == 1
    for rounds, targets in zip(found, ranks, strict=True):
        assert [one for taken in rounds for one in taken] == targets
        assert max(sum(one.entry.data.nbytes for one in taken if one.into is not None) for taken in rounds) <= 120
        assert len(rounds[0]) == min(len(targets), 4), "what goes where it belongs needs no memory of its own"


def test_a_single_rank_loads_in_one_round(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [target(40, torch.empty(1)) for _ in range(12)]
    assert rounds_of([targets], checkpoint, monkeypatch) == [[targets]]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_file_is_verified_by_one_rank(
    size: int, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"__{number}_0.distcp" for number in range(5)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 100)
    files = {name: fingerprint(tmp_path / name) for name in names}
    monkeypatch.setattr(checkpoint.dist, "get_world_size", lambda: size)

    def refusals() -> list[str]:
        found = []
        for rank in range(size):
            monkeypatch.setattr(checkpoint.dist, "get_rank", lambda rank=rank: rank)
            try:
                checkpoint._verify(tmp_path, files)
            except CheckpointError as error:
                found.append(str(error))
        return found

    assert refusals() == []
    for name in names:
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-1] + b"?")
        (refusal,) = refusals()
        assert f"{name} has" in refusal and "damaged" in refusal
        (tmp_path / name).write_bytes(whole)


def test_a_full_disk_is_the_reason_of_the_error_that_torch_raises_over_it(checkpoint: Any, tmp_path: Path) -> None:
    file = (tmp_path / "part").open("wb", buffering=0)
    with file, full_disk(600), pytest.raises(RuntimeError, match="unexpected pos") as raised:
        torch.save(torch.zeros(100_000), file)
    assert "File too large" in str(checkpoint.disk_error(raised.value))
    assert str(checkpoint.disk_error(ValueError("mine"))) == "mine"
