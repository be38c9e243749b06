"""Refits into SGLang engines, which call `receive` for each of them.

    engine = sglang.Engine(model_path=model, custom_weight_loader=[RECEIVE])          # or --custom-weight-loader
    trainer = SglangTrainer(Meeting("10.0.0.1:29600", "train", rank, size), slices_of(module, dtype="bfloat16"),
                            tensors_of(module, dtype="bfloat16"), dtype="bfloat16", update=engine.update_weights_from_tensor)
    trainer.send()                                                                     # on every rank, after each step

Only rank 0 needs `update`: a function with the arguments of `Engine.update_weights_from_tensor`. Where an engine's rank has
each weight is recorded from the model's own `load_weights`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from dagrl.channels import Channel, open_channel
from dagrl.errors import ConfigError
from dagrl.refit.carry.commit import commit_together
from dagrl.refit.carry.endpoint import RefitReceiver, RefitSender
from dagrl.refit.recorded import Recorded, check_complete, named_tensors
from dagrl.refit.recording import record
from dagrl.refit.rendezvous import Meeting, meet, while_called
from dagrl.refit.slices import WeightSlice
from dagrl.refit.transfers import Verify

RECEIVE = "dagrl.workers.sglang.receive"
"""The name of `receive`, for SGLang's `custom_weight_loader`."""

_ATTRIBUTE = "dagrl_refit"


class SglangTrainer:
    """One trainer rank's end; see the module's docstring. `dtype` is that of the weights."""

    def __init__(
        self,
        meeting: Meeting,
        slices: Sequence[WeightSlice],
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: str,
        verify: Verify = "off",
        update: Callable[..., object] | None = None,
    ) -> None:
        if meeting.leads != (update is not None):
            raise ConfigError("give `update`, the engine's update_weights_from_tensor, to the trainer of rank 0 alone")
        self._meeting, self._slices, self._tensors, self._update = meeting, slices, tensors, update
        self._dtype, self._verify, self._version = dtype, verify, 0
        self._end: tuple[Channel, RefitSender] | None = None

    def send(self) -> None:
        """Sends the weights as they are now. On rank 0 it returns when all ranks of the engine have committed."""
        self._version += 1
        told = {"address": self._meeting.address, "timeout_s": self._meeting.timeout_s, "version": self._version}
        message = torch.frombuffer(bytearray(json.dumps({**told, "dtype": self._dtype}), "utf-8"), dtype=torch.uint8)
        update = self._update
        calls = [lambda: update([("dagrl", message)], load_format=RECEIVE)] if update is not None else []
        while_called(self._send, calls)

    def _send(self, check: Callable[[], None]) -> None:
        if self._end is None:
            device = next((tensor.device for tensor in self._tensors.values()), None)
            plan, spec = meet(
                self._meeting, self._slices, device=device, dtype=self._dtype, verify=self._verify, while_waiting=check
            )
            channel = open_channel(spec)
            self._end = channel, RefitSender(plan, self._tensors, channel)
        channel, sender = self._end
        with commit_together(channel, wait=False):
            sender.send(self._version)

    def close(self) -> None:
        """Closes the channel."""
        if self._end is not None:
            self._end[0].close()
        self._end = None


def receive(model: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Receives one refit into the live parameters of this rank of an engine. SGLang calls it with the trainer's message."""
    (told,) = (json.loads(message.cpu().numpy().tobytes()) for _, message in named)
    end = model.__dict__.get(_ATTRIBUTE)
    if end is None or end.address != told["address"] or told["version"] == 1:
        if end is not None:
            end.channel.close()
        end = _EngineEnd(model, told["address"], told["dtype"], told["timeout_s"])
        object.__setattr__(model, _ATTRIBUTE, end)
    end.receive(told["version"])


class _EngineEnd:
    """One rank of an engine that has met its trainer."""

    def __init__(self, model: torch.nn.Module, address: str, dtype: str, timeout_s: float) -> None:
        from sglang.srt.runtime_context import get_parallel, get_server_args

        arguments, parallel = get_server_args(), get_parallel()
        if parallel.dp_size > 1 or arguments.quantization:
            raise ConfigError("refits into SGLang need dp_size 1 and no quantization; start one engine per replica")
        found = record(model, checkpoint_of(Path(arguments.model_path)), getattr(torch, dtype))
        check_complete(type(model).__name__, found)
        held = named_tensors(model)
        self._recorded, self.address = Recorded(found, held), address
        rank, size = parallel.tp_rank + parallel.tp_size * parallel.pp_rank, parallel.tp_size * parallel.pp_size
        device = next(iter(held.values())).device
        plan, spec = meet(Meeting(address, "generation", rank, size, timeout_s), found.slices, device=device)
        self.channel = open_channel(spec)
        self._receiver = RefitReceiver(plan, self._recorded.tensors, self.channel)

    def receive(self, version: int) -> None:
        with torch.inference_mode(), commit_together(self.channel, wait=True):
            self._receiver.receive(version)
            self._recorded.compute()


def checkpoint_of(directory: Path) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Yields name, shape and dtype of each parameter of a checkpoint. Raises ConfigError if there is none."""
    from safetensors import safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} has no *.safetensors; start SGLang with the directory of a plain checkpoint")
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                shape = tuple(part.get_shape())
                yield name, shape, (part[:0] if shape else opened.get_tensor(name)).dtype
