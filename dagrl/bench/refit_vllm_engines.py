"""vLLM's own weight transfers as baselines of a refit: its engines `ipc` and `nccl`, with their code on both ends.

They send whole parameters from one trainer rank, so they are measured with one rank a side. vLLM's calls from trainer to
worker, by HTTP or Ray in a run, go over the benchmark's store, which is faster. Works with vLLM 0.26, whose trainer's end
is a function, and with later versions, whose trainer's end is an object.
"""

import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dagrl.bench.refit_cases import RefitCase
from dagrl.bench.refit_control import Control
from dagrl.bench.refit_sides import Side
from dagrl.errors import RunError
from dagrl.refit.carry.pack import view
from dagrl.refit.slices import expand
from dagrl.workers.megatron.weights import parameter_shapes

_DONE = "done"


@dataclass(frozen=True)
class Weight:
    """What vLLM's trainer says of a parameter before it sends it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class ExportedWeights:
    """Whole parameters under the names of the checkpoint: vLLM's `WeightSource` of Megatron's modules on one rank.

    Unless `ready`, every iteration copies them from the modules, as an export does.
    """

    def __init__(self, case: RefitCase, side: Side, ready: bool) -> None:
        slices = list(expand(case.sources()[0]))
        device = next(iter(side.tensors.values())).device
        shapes = parameter_shapes(case.config).items()
        self.tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes}
        self._to = [self.tensors[one.name][tuple(slice(*edges) for edges in one.box)] for one in slices]
        self._of = [view(side.tensors, one.tensor, one.local, [stop - start for start, stop in one.box]) for one in slices]
        self._ready = ready
        self._export()

    def _export(self) -> None:
        torch._foreach_copy_(self._to, self._of)
        torch.cuda.synchronize()

    def metadata(self) -> list[Weight]:
        """Returns name, dtype and shape of each parameter, in the order of the iteration."""
        return [Weight(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._ready:
            self._export()
        yield from self.tensors.items()


class Calls:
    """vLLM's `VLLMWeightSyncClient`: each call runs on the generation rank, and returns when it has."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update")

    def call(self, method: str, *arguments: Any) -> None:
        """Raises RunError with the generation rank's traceback if it failed."""
        self._control.gather((method, arguments))
        failed = [error for error in self._control.gather("") if error]
        if failed:
            raise RunError(failed[0])


def answer_calls(control: Control, worker: object) -> None:
    """Runs the trainer's calls as methods of `worker` until the last one. Raises RunError if the trainer failed."""
    while True:
        call: Any = control.gather(None)[0]
        method, arguments = call
        error = ""
        try:
            if method != _DONE:
                getattr(worker, method)(*arguments)
        except Exception:
            error = traceback.format_exc()
        control.gather(error)
        if method == _DONE:
            if any(arguments):
                raise RunError(str(arguments[0]))
            return


class Worker:
    """vLLM's end in a worker: what `gpu_worker.py` does with the engine, around a model that the benchmark holds."""

    def __init__(self, backend: str, side: Side, device: torch.device) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        self._config, self._model = side.config, side.model
        transfers = WeightTransferConfig(backend=backend)
        self._engine = WeightTransferEngineFactory.create_engine(transfers, side.config, device, side.model)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        with self._as_in_a_worker():
            self._engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        with self._as_in_a_worker():
            self._engine.update_weights(update_info)

    def finish_weight_update(self) -> None:
        with self._as_in_a_worker():
            self._engine.finish_weight_update()
        torch.cuda.synchronize()

    def shutdown(self) -> None:
        self._engine.shutdown()

    def _as_in_a_worker(self) -> Any:
        from vllm.config import set_current_vllm_config

        stack = ExitStack()
        stack.enter_context(set_current_vllm_config(self._config))
        stack.enter_context(torch.no_grad())
        return stack


class VllmEngine:
    """A transfer by vLLM's engine `backend`, from Megatron's modules on rank 0 to vLLM's modules on rank 1."""

    def __init__(
        self,
        case: RefitCase,
        side: Side,
        control: Control,
        device: torch.device,
        backend: str,
        address: str,
        packed: bool,
        ready: bool = False,
    ) -> None:
        self._control, self._calls, self._is_sender = control, Calls(control), control.rank == 0
        self._worker: Worker | None = None
        self.buffer_bytes, error = 0, ""
        try:
            if self._is_sender:
                weights = ExportedWeights(case, side, ready)
                self.buffer_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
            else:
                self._worker = Worker(backend, side, device)
        except Exception:
            error = traceback.format_exc()
        failed = [one for one in control.gather(error) if one]
        if failed:
            raise RunError(failed[0])
        with self._calling():
            if self._is_sender:
                self._send = (_ipc if backend == "ipc" else _nccl)(self._calls, weights, packed, address)

    def run(self) -> None:
        """Transfers the whole model; returns when it has arrived."""
        with self._calling():
            if self._is_sender:
                self._send()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Answers the trainer's calls on the generation rank, until the trainer has left this block or failed in it."""
        error = ""
        try:
            yield
        except Exception:
            error = traceback.format_exc()
            raise
        finally:
            if self._is_sender:
                self._calls.call(_DONE, error)
            else:
                answer_calls(self._control, self._worker)

    def close(self) -> None:
        """Releases what vLLM's ends hold."""
        if self._worker is not None:
            self._worker.shutdown()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        self._control.barrier()


def _ipc(calls: Calls, weights: ExportedWeights, packed: bool, address: str) -> Callable[[], None]:
    from vllm.distributed.weight_transfer import ipc_engine

    if hasattr(ipc_engine, "IPCTrainerWeightTransferEngine"):
        info = ipc_engine.IPCTrainerInitInfo(rank=0, packed=packed)
        trainer = ipc_engine.IPCTrainerWeightTransferEngine.trainer_init(info, client=calls, source=weights)
        return trainer.send_weights  # type: ignore[no-any-return]
    calls.init_weight_transfer_engine({})
    arguments = {"send_mode": lambda info: calls.update_weights(asdict(info)), "packed": packed}

    def send() -> None:
        calls.start_weight_update()
        ipc_engine.IPCWeightTransferEngine.trainer_send_weights(iter(weights), arguments)
        calls.finish_weight_update()

    return send


def _nccl(calls: Calls, weights: ExportedWeights, packed: bool, address: str) -> Callable[[], None]:
    from vllm.distributed.weight_transfer import nccl_engine

    host, port = address.rsplit(":", 1)
    meeting = {"master_address": host, "master_port": int(port), "world_size": 2}
    if hasattr(nccl_engine, "NCCLTrainerWeightTransferEngine"):
        info = nccl_engine.NCCLTrainerInitInfo(rank=0, packed=packed, **meeting)
        trainer = nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(info, client=calls, source=weights)
        return trainer.send_weights  # type: ignore[no-any-return]
    pool = ThreadPoolExecutor(1)
    pending = pool.submit(calls.init_weight_transfer_engine, {**meeting, "rank_offset": 1})
    group = nccl_engine.NCCLWeightTransferEngine.trainer_init(meeting)
    pending.result()
    update = {
        "names": [one.name for one in weights.metadata()],
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in weights.metadata()],
        "shapes": [list(one.shape) for one in weights.metadata()],
        "packed": packed,
    }

    def send() -> None:
        calls.start_weight_update()
        pending = pool.submit(calls.update_weights, update)
        nccl_engine.NCCLWeightTransferEngine.trainer_send_weights(iter(weights), {"group": group, "packed": packed})
        pending.result()
        calls.finish_weight_update()

    return send
