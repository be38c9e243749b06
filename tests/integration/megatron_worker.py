"""MegatronWorker for tests, which also reports gradients and state. Runs in the processes of `MegatronPool`."""

import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from dagrl.refit.slices import Box
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import ReplayContext, replay_context
from dagrl.workers.megatron import MegatronTeacherWorker, MegatronValueWorker, MegatronWorker
from dagrl.workers.megatron.backend import MegatronBackend


@contextmanager
def gradients_alone() -> Iterator[None]:
    """Context of a warm-up that runs every microbatch: steps leave the gradients of the whole batch and update nothing."""
    with patch("dagrl.workers.train.microbatches.warmup_count", return_value=sys.maxsize):
        with replay_context(ReplayContext("test", 0, True)):
            yield


class TestedWorker(MegatronWorker):
    """Adds methods for tests. Tensors are returned as numpy arrays over pipes."""

    __test__ = False

    def megatron(self) -> MegatronBackend:
        backend = self.backend()
        assert isinstance(backend, MegatronBackend)
        return backend

    @property
    def trainer(self) -> Any:
        """The model, its passes and its optimizer."""
        return self.megatron().trainer

    def gradients(self) -> list[tuple[str, Box, Any]]:
        """Returns HF name, box and values of this rank's gradients after the last step."""
        return self._boxes({name: parameter.main_grad for name, parameter in self.trainer.model.parameters().items()})

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

    def own_logprobs(self, batch: Batch, model: Literal["policy", "reference"] = "policy") -> Any:
        """Returns the log-probabilities `[rows, tokens]` on a reporting worker."""
        rows = self.logprobs(batch, model)
        assert rows is not None
        return rows["logprobs"]

    def configure(self, policy: dict[str, Any]) -> None:
        """Replaces keys of `policy` that a worker reads in each phase."""
        section = self.config.policy.model_copy(update=policy)
        self.config = self.trainer.settings = self.config.model_copy(update={"policy": section})

    def set_loss(self, **keys: Any) -> None:
        self.config = self.config.model_copy(update={"loss_fn": self.config.loss_fn.model_copy(update=keys)})

    def weights(self) -> list[tuple[str, Box, Any]]:
        """Returns HF name, box and values of this rank's weights."""
        return self._boxes(self.weight_tensors())

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

    def moments(self) -> list[tuple[str, Box, Any]]:
        """Returns HF name, box and values of Adam's first moments, for an unsharded optimizer."""
        states = {parameter: state for inner in self.trainer.inner_optimizers() for parameter, state in inner.state.items()}
        parameters = self.trainer.model.parameters()
        return self._boxes({name: states[parameter]["exp_avg"] for name, parameter in parameters.items()})

    def recordings(self) -> int:
        from dagrl.workers.megatron.cuda_graphs import RecordedPasses

        way = self.trainer.model_pass
        assert isinstance(way, RecordedPasses)
        return way.count

    def shorten_checkpoints(self, seconds: float) -> None:
        timeouts = self.config.timeouts.model_copy(update={"checkpoint_s": seconds})
        self.config = self.config.model_copy(update={"timeouts": timeouts})

    def stall_writing(self) -> None:
        """Makes the next checkpoint stop before its first file, until `release_writing`."""
        from dagrl.workers.train import checkpoint

        self.released, save = threading.Event(), checkpoint.save

        def stalled(*_: Any) -> dict[str, Any]:
            checkpoint.save = save
            self.released.wait()
            return {}

        checkpoint.save = stalled

    def release_writing(self) -> None:
        self.released.set()

    def attention_runs(self, batch: Batch) -> list[int]:
        """Returns how often each layer's attention runs in a step without update."""
        from dagrl.workers.megatron.attention import CausalAttention

        layers = [m for chunk in self.trainer.model.chunks for m in chunk.modules() if isinstance(m, CausalAttention)]
        runs = [0] * len(layers)

        def count(index: int) -> Any:
            def hook(*_: Any) -> None:
                runs[index] += 1

            return hook

        hooks = [layer.register_forward_hook(count(index)) for index, layer in enumerate(layers)]
        self.train_step(batch, "likelihood")
        for hook in hooks:
            hook.remove()
        return runs

    def exceed_memory(self, batch: Batch) -> None:
        """Runs a step in which a layer needs more memory than there is, and then `abort()`, as the runtime does."""
        import torch

        from dagrl.workers.megatron.attention import CausalAttention

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        modules = (module for chunk in self.trainer.model.chunks for module in chunk.modules())
        layer = [module for module in modules if isinstance(module, CausalAttention)][1]
        hook = layer.register_forward_hook(fail)
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
        layers = [m for chunk in self.trainer.model.chunks for m in chunk.modules() if isinstance(m, GroupedExperts)]
        hooks = [layer.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[1].tolist())) for layer in layers]
        self.logprobs(batch)
        for hook in hooks:
            hook.remove()
        return np.array(counts).reshape(-1, len(layers), len(counts[0])).sum(0)  # over microbatches

    def optimizers_beside_another_adam(self) -> set[str]:
        """Returns the optimizer classes if Transformer Engine or Apex is installed, whose Adam Megatron prefers."""
        from megatron.core import optimizer as megatron_optimizer

        from dagrl.workers.megatron.trainer import make_trainer

        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        try:
            trainer = make_trainer(self.trainer.model, self.trainer.steps, self.config, self.context.layout)
        finally:
            megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
        return {f"{type(inner).__module__}.{type(inner).__name__}" for inner in trainer.inner_optimizers()}

    def reseed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def shorten_collectives(self, seconds: float) -> None:
        """Sets the deadline of the default group. Megatron's own groups keep theirs."""
        import torch.distributed as dist

        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))

    def hold_writing(self, marker: str) -> None:
        from dagrl.workers.train import checkpoint

        save = checkpoint.save

        def save_later(*given: Any) -> Any:
            checkpoint.save = save
            while not Path(marker).exists():
                time.sleep(0.01)
            return save(*given)

        checkpoint.save = save_later

    def slow_disk(self, seconds: float) -> None:
        """Delays writing and reading of the next checkpoint's files by `seconds`."""
        from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

        for owner, name in ((FileSystemWriter, "write_data"), (FileSystemReader, "read_data")):
            own = getattr(owner, name)

            def slowly(files: Any, *given: Any, owner: Any = owner, name: str = name, own: Any = own) -> Any:
                time.sleep(seconds)
                setattr(owner, name, own)
                return own(files, *given)

            setattr(owner, name, slowly)

    def fill_disk(self, full: bool) -> None:
        """Makes writing the next checkpoint's files fail, if the disk is `full`."""
        from torch.distributed.checkpoint import FileSystemWriter

        own = FileSystemWriter.write_data

        def fail(*_: Any) -> None:
            FileSystemWriter.write_data = own  # type: ignore[method-assign]
            raise OSError(errno.ENOSPC, "No space left on device")

        if full:
            FileSystemWriter.write_data = fail  # type: ignore[assignment, method-assign]

    def resident_bytes(self) -> dict[str, int]:
        """Returns the bytes of each part of the train state on the worker's device."""
        from dagrl.workers.train.offload import unique_storages

        trainer = self.trainer
        tensors = {
            "weights": trainer.state("weights"),
            "gradients": trainer.state("gradients"),
            "optimizer": trainer.state("optimizer"),
        }
        return {part: sum(storage.nbytes() for storage in unique_storages(held)) for part, held in tensors.items()}

    def threads(self) -> int:
        """Returns the number of threads of this process, after waiting for ending threads."""
        counts = [len(os.listdir("/proc/self/task"))]
        for _ in range(20):
            time.sleep(0.05)
            counts.append(len(os.listdir("/proc/self/task")))
        return min(counts)

    def aborted_after(self, seconds: float | None, method: str, *args: Any) -> Any:
        """Runs a method with a concurrent `abort()` from another thread, as in the runtime; None: without."""
        if seconds is not None:
            threading.Timer(seconds, self.abort).start()
        return getattr(self, method)(*args)

    def export_in_files(self, directory: str, file_bytes: int) -> None:
        from dagrl.workers.train import hf_export

        usual, hf_export.FILE_BYTES = hf_export.FILE_BYTES, file_bytes
        try:
            self.export_hf(directory)
        finally:
            hf_export.FILE_BYTES = usual

    def export_to_a_full_disk(self, directory: str, file_bytes: int) -> None:
        """Runs `export_in_files`; the second file cannot be written."""
        from safetensors import torch as files

        save, written = files.save_file, []

        def fill(*args: Any, **kwargs: Any) -> None:
            if written:
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(args)
            save(*args, **kwargs)

        files.save_file = fill
        try:
            self.export_in_files(directory, file_bytes)
        finally:
            files.save_file = save

    def _boxes(self, tensors: dict[str, Any]) -> list[tuple[str, Box, Any]]:
        from dagrl.refit.slices import expand
        from dagrl.workers.train.hf_load import local_view

        return [
            (piece.name, piece.box, local_view(tensors[piece.tensor], piece).float().cpu().clone().numpy())
            for piece in expand(self.weight_slices())
            if piece.tensor in tensors  # an expert bias has no gradient
        ]


class TestedValueWorker(TestedWorker, MegatronValueWorker):
    """A critic worker with the methods for tests."""


class TestedTeacherWorker(TestedWorker, MegatronTeacherWorker):
    """A teacher worker with the methods for tests."""


KINDS = {"policy": TestedWorker, "value": TestedValueWorker, "teacher": TestedTeacherWorker}
