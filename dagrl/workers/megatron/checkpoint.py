"""Checkpoints of a train group in Megatron's distributed format (torch DCP): written by all ranks, read at any layout.

    checkpoint/
      manifest.json    model identity, driver state, and every file with size and CRC-32; written last metadata.json
      common.pt .metadata __<rank>_<n>.distcp      Megatron's `dist_checkpointing` format, readable by its tools

Files are written to `<name>.partial`, which is renamed when every file is complete, so a directory of the final name is
always whole. `CheckpointSave` splits the work. Planning and staging need all ranks and unchanged weights. Writing takes the
longest; it runs in threads and can overlap training. `finish` needs all ranks again. Imported only where Megatron is.
"""

from __future__ import annotations

import json
import math
import queue
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy, checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from dagrl.config import Json
from dagrl.errors import CheckpointError
from dagrl.files import replace_directory
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.groups import gather_objects, run_on_all_ranks
from dagrl.workers.megatron.manifest import FORMAT, MANIFEST, fingerprint, read_manifest
from dagrl.workers.megatron.sharding import LoadTarget, ToHost, entries_to_save, load_targets, set_step_count, step_count
from dagrl.workers.megatron.trainer import Trainer
from dagrl.workers.train.host_memory import StagingBuffers
from dagrl.workers.train.offload import unique_storages

LOAD_BYTES = 2 << 30  # host memory per loading round


class CheckpointSave:
    """One checkpoint being saved. Create it on all ranks together and call `finish`; `background` writes from a copy.

    Ranks wait for each other's files in `group`, which has a long deadline.
    """

    def __init__(
        self,
        directory: str,
        trainer: Trainer,
        reference: Mapping[str, Tensor] | None,
        state: Mapping[str, Json],
        identity: Mapping[str, Json],
        group: ProcessGroup,
        *,
        background: bool,
    ) -> None:
        self.directory = Path(directory)
        self._group = group
        self._partial = Path(f"{directory}.partial")
        self._head = {"format": FORMAT, "identity": identity, "state": state, "reference": reference is not None}
        self._head["layout"] = dict(asdict(trainer.layout))
        self._error: BaseException | None = None
        run_on_all_ranks(group, lambda: _make_empty(self._partial))
        to_host = StagingBuffers().copy if background else Tensor.cpu
        content = _state_dict(trainer, reference, to_host)
        self._request = run_on_all_ranks(group, lambda: _plan(content, self._partial))
        self._buckets = _staged(self._request, to_host, _live_storages(trainer, reference))
        self._files: dict[str, dict[str, int]] = {}
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's files are written, so that `finish` does not wait."""
        return not self._thread.is_alive()

    def finish(self, timeout_s: float) -> None:
        """Completes and renames the checkpoint, on all ranks together. Raises CheckpointError on all if one failed."""
        self._thread.join(timeout_s)
        run_on_all_ranks(self._group, self._check_written, timeout_s)
        run_on_all_ranks(self._group, self._finalize)
        files = {name: entry for part in gather_objects(self._group, self._files) for name, entry in part.items()}
        run_on_all_ranks(self._group, lambda: self._publish(files) if dist.get_rank() == 0 else None)

    def _check_written(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            raise CheckpointError(
                f"{self._partial} is not written after {timeout_s:.0f} s; the disk is slow or stuck. "
                "Raise timeouts.checkpoint_s if it is slow"
            )
        if self._error is not None:
            raise CheckpointError(f"cannot write {self._partial}: {disk_error(self._error)}") from self._error

    def _write(self) -> None:
        try:
            _write_buckets(self._request, self._buckets)
            self._files = {name: fingerprint(Path(path)) for path, name, _ in self._buckets}
        except Exception as error:  # `finish` raises it on all ranks
            self._error = error
        self._buckets = []

    def _finalize(self) -> None:
        for function in self._request.finalize_fns:  # collectives: rank 0 gathers results and writes Megatron's metadata
            function()

    def _publish(self, files: dict[str, dict[str, int]]) -> None:
        rest = [path for path in sorted(self._partial.iterdir()) if path.name not in files]
        files |= {path.name: fingerprint(path) for path in rest}
        (self._partial / MANIFEST).write_text(json.dumps({**self._head, "files": files}, indent=1))
        replace_directory(self._partial, self.directory)


def load_checkpoint(
    directory: str, trainer: Trainer, identity: Mapping[str, Json], group: ProcessGroup
) -> tuple[dict[str, Tensor] | None, dict[str, Json]]:
    """Loads a checkpoint on all ranks together. Returns the reference policy's weights, if any, and the driver's state.

    Ranks wait for each other in `group`, as in `CheckpointSave`. Every byte is verified before anything changes. Raises
    CheckpointError on all ranks if one cannot read its part.
    """
    path = Path(directory)
    manifest = run_on_all_ranks(group, read_manifest, path, identity)
    run_on_all_ranks(group, _verify, path, manifest["files"])
    reference = None
    if manifest["reference"]:
        reference = {name: torch.empty_like(tensor, device="cpu") for name, tensor in trainer.model.tensors().items()}
    with torch.no_grad(), _loading_in(group):
        for part in _rounds(load_targets(trainer, reference), group):
            wanted = {str(number): target.entry for number, target in enumerate(part)}
            loaded = run_on_all_ranks(group, _read, path, wanted)
            for number, target in enumerate(part):
                target.receive(loaded[str(number)])
        same = manifest["layout"] == asdict(trainer.layout)
        common = {"random": _random_object(trainer.layout, None)} if same else {}
        restore_counters(trainer, run_on_all_ranks(group, _read, path, common))
    return reference, manifest["state"]


def random_state() -> dict[str, Any]:
    """Returns the state of this process's random generators."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "megatron": get_cuda_rng_tracker().get_states()}


def _state_dict(trainer: Trainer, reference: Mapping[str, Tensor] | None, to_host: ToHost) -> dict[str, Any]:
    with torch.no_grad():
        entries = {str(number): entry for number, entry in enumerate(entries_to_save(trainer, reference, to_host))}
    _wait_for_copies()  # Megatron's plan copies some tensors
    return {**entries, "random": _random_object(trainer.layout, random_state()), "trainer": counters(trainer)}


def _random_object(layout: ParallelLayout, data: Any) -> ShardedObject:
    """Each rank's generator state, which only applies to the same layout."""
    return ShardedObject("random", data, (layout.world_size,), (dist.get_rank(),))


def counters(trainer: Trainer) -> dict[str, Any]:
    """Returns how far the schedule and the optimizer are."""
    return {
        "schedule_steps": trainer.scheduler.num_steps,
        "steps": step_count(trainer),
        "skipped_steps": trainer.skipped_steps,
    }


def restore_counters(trainer: Trainer, content: Mapping[str, Any]) -> None:
    """Restores `counters` in `content["trainer"]`, and `random_state` in `content["random"]` if that is there."""
    found = content["trainer"]
    trainer.restart_schedule(found["schedule_steps"])
    set_step_count(trainer, found["steps"])
    trainer.skipped_steps = found["skipped_steps"]
    if "random" in content:
        _set_random_state(content["random"])


def _set_random_state(state: Mapping[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _plan(content: dict[str, Any], directory: Path) -> Any:
    """Returns Megatron's write request. A collective.

    Results return through a queue of this process, because Megatron's own queue would start another process.
    """
    filesystem_async._results_queue = queue.Queue()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    return dist_checkpointing.save(content, str(directory), strategy, async_sharded_save=True)


FileContents = tuple[str, str, tuple[list[Any], list[Any]]]
"""Path and name of a file, and its content: bytes and tensors."""


def _staged(request: Any, to_host: ToHost, live: set[int]) -> list[FileContents]:
    """Returns what this rank writes, in host memory. `to_host` copies tensors on a GPU or in `live` storages."""
    if request.async_fn is None:
        return []

    def staged(tensor: Tensor) -> Tensor:
        settled = tensor.is_cpu and tensor.untyped_storage()._cdata not in live
        return tensor if settled else to_host(tensor)

    buckets = [
        (path, name, (data, [(item, staged(tensor)) for item, tensor in tensors]))
        for path, name, (data, tensors) in request.async_fn_args[1]
    ]
    _wait_for_copies()
    return buckets


def _wait_for_copies() -> None:
    """Waits for the copies that `to_host` started."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _live_storages(trainer: Trainer, reference: Mapping[str, Tensor] | None) -> set[int]:
    """Returns storages that further training changes. Megatron's plan holds views of them, and own copies."""
    tensors = [*trainer.weight_tensors(), *trainer.optimizer_tensors(), *(reference or {}).values()]
    return {storage._cdata for storage in unique_storages(tensors)}


def disk_error(error: BaseException) -> BaseException:
    """The OSError during which `error` was raised, if any: torch's writer raises one of its own over a full disk's."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def _write_buckets(request: Any, buckets: list[FileContents]) -> None:
    """Writes each file in a thread with Megatron's writer, which would otherwise fork processes."""
    if not buckets:
        return
    transforms, results = request.async_fn.args[0], request.async_fn_args[2]

    def write(number: int) -> list[Any]:
        mine: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[Any] = queue.Queue()
        count.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, number, buckets[number], mine, count, True)
        _, outcome = mine.get()
        if isinstance(outcome, Exception):
            raise outcome
        return list(outcome)

    with ThreadPoolExecutor(len(buckets)) as pool:
        results.put(dict(enumerate(pool.map(write, range(len(buckets))))))


@contextmanager
def _loading_in(group: ProcessGroup) -> Iterator[None]:
    """Makes torch's DCP use `group` for loading. Megatron passes none, and the default group's deadline is shorter."""
    load = checkpoint.load_state_dict
    checkpoint.load_state_dict = partial(load, process_group=group)
    try:
        yield
    finally:
        checkpoint.load_state_dict = load


def _rounds(found: Iterable[LoadTarget], group: ProcessGroup) -> Iterator[list[LoadTarget]]:
    """Yields targets in rounds of about `LOAD_BYTES` of host memory. All ranks have equally many, as loading is collective.

    A single rank has one round, because Megatron would assume that layers missing from a round are on another rank.
    """
    source, more = iter(found), True
    limit = LOAD_BYTES if dist.get_world_size() > 1 else math.inf
    while any(gather_objects(group, more)):
        taken: list[LoadTarget] = []
        size = 0
        while more and size < limit:
            target = next(source, None)
            more = target is not None
            if target is not None:
                taken.append(target)
                size += target.entry.data.nbytes if target.into is not None else 0
        yield taken


def _read(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(path), validate_access_integrity=False)
    return loaded


def _make_empty(directory: Path) -> None:
    """Creates an empty directory. Removes the rest of an interrupted save."""
    if dist.get_rank() == 0:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)


def _verify(target: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Compares this rank's share of the files with the manifest."""
    for name in sorted(files)[dist.get_rank() :: dist.get_world_size()]:
        path = target / name
        if not path.exists():
            raise CheckpointError(f"{path} is missing; the checkpoint is incomplete, resume from another one")
        found = fingerprint(path)
        if found != files[name]:
            raise CheckpointError(
                f"{path} has {found}, but its manifest says {files[name]}; the file is damaged, resume from another one"
            )
