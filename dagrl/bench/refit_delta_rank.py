"""One process of `bench refit --delta`: the trainer, or the engine's rank.

python -m dagrl.bench.refit_delta_rank trainer|engine ADDRESS LEARNING_RATE STEPS LAYERS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from dagrl.channels import Channel, open_channel
from dagrl.config import Json
from dagrl.refit import RefitReceiver, RefitSender, WeightSlice, commit_together
from dagrl.refit.rendezvous import Meeting, Side, meet
from dagrl.refit.slices import tensor_shapes
from dagrl.refit.sources import slices_of, tensors_of
from dagrl.refit.transfers import DeltaMode
from dagrl.workers.vllm.described import describe_ranks

MODES: tuple[DeltaMode, ...] = ("off", "lossless")
DEADLINE_S = 300.0
ROWS, TOKENS = 8, 64


def config_of(layers: int) -> dict[str, Json]:
    """Returns a narrow Qwen3 of `layers` layers, with published heads, norms and initialization."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 16384,
        "tie_word_embeddings": True,
    }


class Trainer:
    """A model in bfloat16 with float32 master weights, as mixed-precision optimizers hold them."""

    def __init__(self, layers: int, learning_rate: float) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(**config_of(layers))
        self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.masters = [parameter.detach().float().requires_grad_() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, learning_rate, weight_decay=0.0)

    def step(self) -> float:
        """Takes a step of a policy gradient. Returns the share of the bfloat16 elements that changed."""
        tokens = torch.randint(0, self.model.config.vocab_size, (ROWS, TOKENS))
        logprobs = self.model(tokens).logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])
        (-(torch.randn(ROWS, 1, 1) * logprobs).mean()).backward()
        changed = total = 0
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            new = master.detach().bfloat16()
            changed += int((new != parameter.data).sum())
            total += new.numel()
            parameter.data.copy_(new)
        return changed / total


def connect(
    side: Side, address: str, mode: DeltaMode, slices: list[WeightSlice], tensors: Mapping[str, Tensor]
) -> tuple[Channel, Any]:
    """Meets the other side. Returns the channel and this side's end."""
    host, _, port = address.rpartition(":")
    own = f"{host}:{int(port) + MODES.index(mode)}"
    meeting = Meeting(own, side, 0, 1, DEADLINE_S)
    plan, spec = meet(meeting, slices, dtype="bfloat16", delta=mode)
    channel = open_channel(spec)
    return channel, (RefitSender if side == "train" else RefitReceiver)(plan, tensors, channel)


def train(address: str, learning_rate: float, steps: int, layers: int) -> dict[str, Any]:
    """Steps and sends. Returns the seconds of each refit and medians of the rest, by mode."""
    trainer = Trainer(layers, learning_rate)
    slices, tensors = slices_of(trainer.model, dtype="bfloat16"), tensors_of(trainer.model, dtype="bfloat16")
    ends = {mode: connect("train", address, mode, slices, tensors) for mode in MODES}
    taken: dict[str, list[tuple[float, float, int, float]]] = {mode: [] for mode in MODES}
    for version in range(steps + 1):
        share = trainer.step()
        for mode in MODES if version % 2 else MODES[::-1]:
            channel, sender = ends[mode]
            channel.agree()  # the engine waits
            start, used = time.perf_counter(), time.process_time()
            with commit_together(channel, wait=True):
                report = sender.send(version)
            if version:  # the first refit is whole, and opens connections
                spent = time.perf_counter() - start, time.process_time() - used
                taken[mode].append((*spent, report.bytes_sent, share))
    found = {}
    for name, mode in (("whole", "off"), ("delta", "lossless")):
        seconds, cpu, sizes, shares = zip(*taken[mode], strict=True)
        facts = {"cpu_s": median(cpu), "megabytes": median(sizes) / 1e6, "changed": median(shares)}
        found[name] = {"seconds": seconds, "facts": facts}
    return found


def receive(address: str, steps: int, layers: int) -> None:
    """Receives every version twice, and compares what both refits wrote."""
    slices = describe_ranks(config_of(layers), 1, {"dtype": "bfloat16"})[0]
    shapes = tensor_shapes(slices)
    held = {mode: {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in shapes.items()} for mode in MODES}
    ends = {mode: connect("generation", address, mode, slices, held[mode]) for mode in MODES}
    for version in range(steps + 1):
        for mode in MODES if version % 2 else MODES[::-1]:
            channel, receiver = ends[mode]
            channel.agree()
            with commit_together(channel, wait=True):
                receiver.receive(version)
        for name, tensor in held["off"].items():
            assert torch.equal(tensor, held["lossless"][name]), f"{name} differs after version {version}"


def main(side: Literal["trainer", "engine"], address: str, learning_rate: str, steps: str, layers: str) -> None:
    torch.set_num_threads(1)  # both processes share the machine
    if side == "trainer":
        row = train(address, float(learning_rate), int(steps), int(layers))
        sys.stdout.write(json.dumps(row) + "\n")
    else:
        receive(address, int(steps), int(layers))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
