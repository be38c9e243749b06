"""An export of several workers, one of which fails while weights are sent: all raise, and no file is half-written.

Three processes over Gloo; each holds a third of every parameter.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dagrl.refit.slices import WeightSlice
from dagrl.runtime.store import reserve_port

RANKS, NAMES = 3, ("a", "b", "c")
START_S, DEADLINE_S = 180.0, 100.0  # to import torch and Megatron beside other tests; of the groups
WHOLE = {name: torch.arange(9 * 4, dtype=torch.float32).view(9, 4) + 100 * i for i, name in enumerate(NAMES)}


class Unreadable(dict[str, torch.Tensor]):
    """Tensors of which `b` cannot be read."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "b":
            raise RuntimeError("CUDA error: an illegal memory access")
        return super().__getitem__(name)


class Deadly(dict[str, torch.Tensor]):
    """Tensors of a process that is killed when it reads `b`."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "b":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)


KINDS: Mapping[str, type[dict[str, torch.Tensor]]] = {"well": dict, "unreadable": Unreadable, "deadly": Deadly}


def slices_of(rank: int) -> list[WeightSlice]:
    return [WeightSlice(name, ((3 * rank, 3 * rank + 3), (0, 4)), name, ((0, 3), (0, 4))) for name in NAMES]


def worker(rank: int, port: int, failing: int, directory: Path, kinds: list[str], connection: Connection) -> None:
    """Exports once for each of `kinds`, the behaviour of rank `failing`; sends the error of each export, or ''."""
    import torch.distributed as dist

    from dagrl.workers.train.hf_export import export_hf

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timedelta(seconds=START_S))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DEADLINE_S))
    connection.send("ready")
    mine = {name: tensor[3 * rank : 3 * rank + 3] for name, tensor in WHOLE.items()}
    for kind in kinds:
        tensors = KINDS[kind if rank == failing else "well"](mine)
        try:
            export_hf(
                directory, directory / "out", [slices_of(one) for one in range(RANKS)], tensors, rank, group, "float32"
            )
            connection.send("")
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
    connection.recv()  # stays until the others have answered: the end of this process must not be what frees them


def exports(directory: Path, failing: int, kinds: list[str]) -> list[list[str | None]]:
    """Returns the answer of each rank, None if it died. Fails if one does not answer within half the groups' deadline."""
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "dagrl.workers.train.hf_export"])
    port, running = reserve_port(), []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=worker, args=(rank, port, failing, directory, kinds, theirs))
        process.start()
        theirs.close()
        running.append((process, ours))
    try:
        for _, connection in running:
            assert connection.poll(START_S), "a worker has not started"
            assert connection.recv() == "ready"
        return [_answers(connection, len(kinds)) for _, connection in running]
    finally:
        for process, _ in running:
            process.kill()
            process.join()


def _answers(connection: Connection, count: int) -> list[str | None]:
    found: list[str | None] = []
    for _ in range(count):
        assert connection.poll(DEADLINE_S / 2), "a worker waits for the deadline"
        try:
            found.append(connection.recv())
        except EOFError:
            return [*found, None]
    return found


@pytest.mark.parametrize("failing", [0, 2])
def test_an_unreadable_part_is_an_error_on_all_workers(failing: int, tmp_path: Path) -> None:
    """The others still receive their messages, so the next export finds the group intact."""
    for answers in exports(tmp_path, failing, ["well", "unreadable", "well"]):
        assert answers == [
            "",
            "CheckpointError: cannot read the weights to export: CUDA error: an illegal memory access",
            "",
        ]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in WHOLE.items())


def test_a_failed_export_keeps_the_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    exports(tmp_path, 1, ["unreadable"])
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"config.json": "{}"}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_worker_killed_while_sending_releases_the_others(failing: int, tmp_path: Path) -> None:
    found = exports(tmp_path, failing, ["deadly"])
    assert found.pop(failing) == [None]
    for (answer,) in found:
        assert answer is not None and answer.startswith("CheckpointError: the export to "), answer
        assert "restart the group" in answer
    assert not (tmp_path / "out").exists()
