"""What GPU tests of refits run inside a vLLM process, on its worker; importable there by name."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from dagrl.refit import RefitReceiver, RefitSender, plan_refit
from dagrl.refit.fp8 import in_blocks, quantize_blocks
from dagrl.refit.slices import WeightSlice, expand
from dagrl.workers.vllm import VllmWorker
from tests.integration.vllm_models import state_of, whole_model
from tests.unit.refit.memory_channel import Done, MemoryChannel


class DeviceChannel(MemoryChannel):
    """Both ends in this process, messages on the GPU; with `flip` one byte of the largest message changes on its way."""

    flip: int | None = None

    def send(self, tensor: Tensor, peer: int) -> Done:
        message = tensor.clone()
        if self.flip is not None and tensor.dtype == torch.uint8 and tensor.numel() > self.flip:
            message[self.flip] ^= 1
        self.queues[self.spec.rank, peer].put(message)
        return Done()

    def receive(self, tensor: Tensor, peer: int) -> Done:
        tensor.copy_(self.queues[peer, self.spec.rank].get(timeout=30))
        return Done()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def refit_from(
    worker: VllmWorker, slices: Sequence[Sequence[WeightSlice]], checkpoint: Path, version: int, flip: int | None = None
) -> None:
    """Refits a bfloat16 checkpoint, held whole on this GPU, into this rank of the engine; verifies every part.

    `slices` are those of all ranks of the engine; what is for the others is sent, and nobody takes it.
    """
    with worker.writing_weights(version):
        sources = {name: tensor.cuda() for name, tensor in state_of(checkpoint).items()}
        plan = plan_refit([whole_model(sources)], slices, dtype="bfloat16", bucket_bytes=1 << 20)
        here = 1 + worker.context.rank
        queues: defaultdict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
        sender, receiver = (DeviceChannel(rank, plan.size, queues) for rank in (0, here))
        sender.flip = flip
        RefitSender(plan.for_rank(0, "checksum"), sources, sender).send(version)
        RefitReceiver(plan.for_rank(here, "checksum"), worker.weight_tensors(), receiver).receive(version)


def held(worker: VllmWorker) -> dict[str, Tensor]:
    """Returns the live parameters of vLLM's model on the host, FP8 as bytes."""
    assert worker._llm is not None
    model = worker._llm.collective_rpc(_model)[0]
    return {name: _raw(tensor.data).cpu() for name, tensor in model.named_parameters(remove_duplicate=False)}


def _model(vllm_worker: Any) -> Any:
    return vllm_worker.get_model()


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def differing(worker: VllmWorker, state: dict[str, Tensor]) -> list[str]:
    """Slices of the engine's memory that are not the checkpoint's, or in FP8 what torch on the CPU makes of it."""
    live, wrong = worker.weight_tensors(), []
    for piece in expand(worker.weight_slices()):
        whole = state[piece.name].to(torch.bfloat16)
        parts = [(piece.tensor, piece.local, piece.box, whole)]
        if piece.scales is not None:
            quantized, scales = quantize_blocks(whole)
            parts = [
                (piece.tensor, piece.local, piece.box, quantized),
                (piece.scales.tensor, piece.scales.local, in_blocks(piece.box), scales),
            ]
        for tensor, local, box, truth in parts:
            found = live[tensor][tuple(slice(*part) for part in local)].cpu()
            expected = truth[tuple(slice(*part) for part in box)].reshape(found.shape)
            if not torch.equal(_raw(found.contiguous()), _raw(expected.contiguous())):
                wrong.append(f"{piece.name} in {tensor}")
    return wrong
