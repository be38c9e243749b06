"""Train workers of both backends for tests, which also report gradients and state; they run in `WorkerPool`'s processes.

Tensors are returned as numpy arrays over pipes.
"""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest.mock import DEFAULT, patch

import numpy as np

from dagrl.config import Config, SequencePackingConfig
from dagrl.refit.slices import Box
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Array, Batch
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import ReplayContext, WorkerContext, replay_context
from dagrl.workers.fsdp import FsdpTeacherWorker, FsdpValueWorker, FsdpWorker
from dagrl.workers.megatron import MegatronTeacherWorker, MegatronValueWorker, MegatronWorker
from dagrl.workers.megatron.backend import MegatronBackend
from dagrl.workers.train.worker import TrainWorker

Boxes = list[tuple[str, Box, Any]]
"""Name, box in the whole tensor, and values, of each part that a rank has."""


@contextmanager
def gradients_alone() -> Iterator[None]:
    """Context of a warm-up that runs every microbatch: steps leave the gradients of the whole batch and update nothing."""
    with patch("dagrl.workers.train.microbatches.warmup_count", return_value=sys.maxsize):
        with replay_context(ReplayContext("test", 0, True)):
            yield


def once(owner: Any, name: str, before: Callable[[], object]) -> None:
    """Runs `before` ahead of the next call of this function of `owner`."""
    own = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        setattr(owner, name, own)
        before()
        return own(*args, **options)

    setattr(owner, name, call)


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class TestedWorker(TrainWorker):
    """Methods for tests, whatever the backend."""

    __test__ = False

    @property
    def trainer(self) -> Any:
        """The model, its passes and its optimizer."""
        return self.backend().model

    def own_logprobs(self, batch: Batch, model: Literal["policy", "reference"] = "policy") -> Any:
        """Returns the log-probabilities `[rows, tokens]` on a reporting worker."""
        rows = self.logprobs(batch, model)
        assert rows is not None
        return rows["logprobs"]

    def set_loss(self, keys: dict[str, Any]) -> None:
        self.config = self.config.model_copy(update={"loss_fn": self.config.loss_fn.model_copy(update=keys)})

    def set_packing(self, keys: dict[str, Any]) -> None:
        policy = self.config.policy.model_copy(update={"sequence_packing": SequencePackingConfig.model_validate(keys)})
        self.config = self.config.model_copy(update={"policy": policy})

    def resident_bytes(self) -> dict[str, int]:
        """Returns the bytes of each part of the train state on the worker's device."""
        from dagrl.workers.train.offload import STATE_PARTS, unique_storages

        tensors = {part: self.trainer.state(part) for part in STATE_PARTS} | {"gradients": self.trainer.gradients()}
        return {part: sum(one.nbytes() for one in unique_storages(some)) for part, some in tensors.items()}

    def aborted_after(self, seconds: float | None, method: str, *args: Any) -> Any:
        """Runs a method with a concurrent `abort()` from another thread, as in the runtime; None: without."""
        if seconds is not None:
            threading.Timer(seconds, self.abort).start()
        return getattr(self, method)(*args)

    def reseed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def threads(self) -> int:
        """Returns the number of threads of this process, after waiting for ending threads."""
        counts = [len(os.listdir("/proc/self/task"))]
        for _ in range(20):
            time.sleep(0.05)
            counts.append(len(os.listdir("/proc/self/task")))
        return min(counts)

    def shorten_collectives(self, seconds: float) -> None:
        """Sets the deadline of the default group. Megatron's own groups keep theirs."""
        import torch.distributed as dist

        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))

    def shorten_checkpoints(self, seconds: float) -> None:
        timeouts = self.config.timeouts.model_copy(update={"checkpoint_s": seconds})
        self.config = self.config.model_copy(update={"timeouts": timeouts})

    def hold_writing(self, marker: str) -> None:
        """Makes the next checkpoint wait before its first file until there is this one."""
        from dagrl.workers.train import checkpoint

        def wait() -> None:
            while not Path(marker).exists():
                time.sleep(0.01)

        once(checkpoint, "save", wait)

    def slow_disk(self, seconds: float) -> None:
        """Delays writing and reading of the next checkpoint's files by `seconds`."""
        from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

        once(FileSystemWriter, "write_data", lambda: time.sleep(seconds))
        once(FileSystemReader, "read_data", lambda: time.sleep(seconds))

    def fill_disk(self, full: bool) -> None:
        """Makes writing the next checkpoint's files fail, if the disk is `full`."""
        from torch.distributed.checkpoint import FileSystemWriter

        if full:
            once(FileSystemWriter, "write_data", no_space)

    def export_in_files(self, directory: str, file_bytes: int) -> None:
        with patch("dagrl.workers.train.hf_export.FILE_BYTES", file_bytes):
            self.export_hf(directory)

    def export_to_a_full_disk(self, directory: str, file_bytes: int) -> None:
        """Runs `export_in_files`; the second file cannot be written."""
        from safetensors import torch as files

        ends = [DEFAULT, OSError(errno.ENOSPC, "No space left on device")]
        with patch.object(files, "save_file", wraps=files.save_file, side_effect=ends):
            self.export_in_files(directory, file_bytes)


class TestedMegatronWorker(TestedWorker, MegatronWorker):
    def megatron(self) -> MegatronBackend:
        backend = self.backend()
        assert isinstance(backend, MegatronBackend)
        return backend

    def modules(self, kind: type) -> list[Any]:
        """Returns the model's modules of a class."""
        return [module for chunk in self.trainer.model.chunks for module in chunk.modules() if isinstance(module, kind)]

    def gradients(self) -> Boxes:
        """Returns the gradients after the last step by HF names."""
        return self._boxes({name: parameter.main_grad for name, parameter in self.trainer.model.parameters().items()})

    def weights(self) -> Boxes:
        return self._boxes(self.weight_tensors())

    def moments(self) -> Boxes:
        """Returns Adam's first moments by HF names, for an unsharded optimizer."""
        states = {parameter: state for inner in self.trainer.inner_optimizers() for parameter, state in inner.state.items()}
        parameters = self.trainer.model.parameters()
        return self._boxes({name: states[parameter]["exp_avg"] for name, parameter in parameters.items()})

    def adapter_gradients(self) -> dict[str, list[Any]]:
        """Returns the gradients of A and B by HF name after the last step."""
        adapters = self.megatron().adapters
        assert adapters is not None
        held = adapters.held.items()
        return {name: [part.main_grad.float().cpu().clone().numpy() for part in adapter] for name, adapter in held}  # type: ignore[attr-defined]

    def products(self, batch: Batch) -> list[tuple[int, ...]]:
        """Returns the shapes of the matrix products of a step, with those added to a buffer, without merged weights."""
        from torch.utils._python_dispatch import TorchDispatchMode

        shapes: list[tuple[int, ...]] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = function(*args, **(kwargs or {}))
                if str(function) in ("aten.mm.default", "aten.addmm_.default"):
                    shapes.append(tuple(result.shape))
                return result

        with Watch():
            self.train_step(batch, "likelihood")
        return shapes

    def trained_elements(self) -> tuple[int, int]:
        """Returns the elements that have gradients, and those of Adam's first moments."""
        trainer = self.trainer
        moments = [state["exp_avg"] for inner in trainer.inner_optimizers() for state in inner.state.values()]
        return (
            sum(part.numel() for chunk in trainer.model.chunks for part in chunk.parameters() if part.requires_grad),
            sum(tensor.numel() for tensor in moments),
        )

    def state(self) -> dict[str, Any]:
        """Returns a copy of everything that a step may change."""
        from dagrl.workers.train.train_state import random_states

        trainer = self.trainer
        values = {f"model.{name}": tensor for name, tensor in trainer.model.tensors().items()}
        for number, inner in enumerate(trainer.inner_optimizers()):
            for index, (parameter, state) in enumerate(inner.state.items()):
                values[f"master.{number}.{index}"] = parameter.data
                values |= {f"{key}.{number}.{index}": value for key, value in state.items()}
        values["random.cpu"] = random_states()["cpu"]
        numbers = {"steps": trainer.steps.taken, "skipped": trainer.steps.skipped}
        return {**numbers, **{name: value.float().cpu().clone().numpy() for name, value in values.items()}}

    def recordings(self) -> int:
        from dagrl.workers.megatron.cuda_graphs import RecordedPasses

        way = self.trainer.model_pass
        assert isinstance(way, RecordedPasses)
        return way.count

    def attention_runs(self, batch: Batch) -> list[int]:
        """Returns how often each layer's attention runs in a step without update."""
        from dagrl.workers.megatron.attention import CausalAttention

        layers, seen = self.modules(CausalAttention), list[int]()
        hooks = [layer.register_forward_hook(lambda *_, at=at: seen.append(at)) for at, layer in enumerate(layers)]
        self.train_step(batch, "likelihood")
        for hook in hooks:
            hook.remove()
        return [seen.count(at) for at in range(len(layers))]

    def exceed_memory(self, batch: Batch) -> None:
        """Runs a step in which a layer needs more memory than there is, and then `abort()`, as the runtime does."""
        import torch

        from dagrl.workers.megatron.attention import CausalAttention

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        hook = self.modules(CausalAttention)[1].register_forward_hook(fail)
        try:
            self.train_step(batch, "likelihood")
        except torch.OutOfMemoryError:
            self.abort()
        hook.remove()

    def tokens_of_experts(self, batch: Batch) -> Any:
        """Returns each expert's tokens [layers, experts] in a log-probability pass, on a worker with all experts."""
        import numpy as np

        from dagrl.workers.megatron.experts import GroupedExperts

        counts: list[list[int]] = []
        layers = self.modules(GroupedExperts)
        hooks = [layer.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[1].tolist())) for layer in layers]
        self.logprobs(batch)
        for hook in hooks:
            hook.remove()
        return np.array(counts).reshape(-1, len(layers), len(counts[0])).sum(0)  # over microbatches

    def optimizers_beside_another_adam(self) -> set[str]:
        """Returns the optimizer classes if Transformer Engine or Apex is installed, whose Adam Megatron prefers."""
        from dagrl.workers.megatron.trainer import make_trainer

        with patch("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False):
            trainer = make_trainer(self.trainer.model, self.trainer.steps, self.config, self.context.layout)
        return {f"{type(inner).__module__}.{type(inner).__name__}" for inner in trainer.inner_optimizers()}

    def _boxes(self, tensors: dict[str, Any]) -> Boxes:
        from dagrl.refit.slices import expand
        from dagrl.workers.train.hf_load import local_view

        return [
            (piece.name, piece.box, local_view(tensors[piece.tensor], piece).float().cpu().clone().numpy())
            for piece in expand(self.weight_slices())
            if piece.tensor in tensors  # an expert bias has no gradient
        ]


class TestedFsdpWorker(TestedWorker, FsdpWorker):
    """Gradients and weights have the names of the module."""

    def gradients(self) -> Boxes:
        parameters = self.trainer.parameters.items()
        return self._boxes({name: parameter.grad for name, parameter in parameters if parameter.grad is not None})

    def weights(self) -> Boxes:
        return self._boxes(self.trainer.parameters)

    def state(self) -> dict[str, Any]:
        """Returns a copy of this rank's weights and optimizer state."""
        parts = [(part, tensor) for part in ("weights", "optimizer") for tensor in self.trainer.state(part)]
        return {f"{part}.{at}": tensor.float().cpu().clone().numpy() for at, (part, tensor) in enumerate(parts)}

    def sent(self) -> dict[str, Any]:
        backend = self.backend()
        with backend.sending():
            return {name: tensor.float().cpu().numpy() for name, tensor in backend.sent_tensors().items()}

    def _boxes(self, tensors: Mapping[str, Any]) -> Boxes:
        from dagrl.refit.sources import held_boxes, local_of

        return [
            (name, box, local_of(tensors[name].detach())[tuple(slice(*run) for run in at)].float().cpu().clone().numpy())
            for name, parameter in self.trainer.parameters.items()
            if name in tensors
            for box, at in held_boxes(name, parameter)
        ]


class MegatronCritic(TestedMegatronWorker, MegatronValueWorker): ...


class MegatronTeacher(TestedMegatronWorker, MegatronTeacherWorker): ...


class FsdpCritic(TestedFsdpWorker, FsdpValueWorker): ...


class FsdpTeacher(TestedFsdpWorker, FsdpTeacherWorker): ...


KINDS = {
    "megatron policy": TestedMegatronWorker,
    "megatron value": MegatronCritic,
    "megatron teacher": MegatronTeacher,
    "fsdp policy": TestedFsdpWorker,
    "fsdp value": FsdpCritic,
    "fsdp teacher": FsdpTeacher,
}


Worker = TypeVar("Worker", bound=TrainWorker)


def train_batch(rows: int, length: int, vocabulary: int) -> Batch:
    """Returns random tokens in full rows; every token but the first counts in the loss."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (rows, length))
    mask = np.ones((rows, length), np.float32)
    mask[:, 0] = 0
    fields: dict[str, Array] = {"tokens": tokens, "lengths": np.full(rows, length, np.int64), "loss_mask": mask}
    scalars = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(rows)}
    return Batch(fields, scalars)


@contextmanager
def single_worker(config: Config, kind: type[Worker]) -> Iterator[Worker]:
    """Yields a worker of a one-worker group in this process."""
    for name, value in kind.environment(config).items():
        os.environ.setdefault(name, value)
    worker = kind(WorkerContext("train", 0, ParallelLayout(), config.seed, 120.0), config)
    worker.setup(f"127.0.0.1:{reserve_port()}")
    try:
        yield worker
    finally:
        worker.shutdown()
