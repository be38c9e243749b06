"""Refits into SGLang's own models, by what is recorded of their loaders; compared with what these loaders do."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import transformers

from dagrl.bench.tiny_configs import tiny_config
from dagrl.refit.recorded import named_tensors
from dagrl.refit.rendezvous import Meeting
from dagrl.refit.sources import slices_of, tensors_of
from dagrl.runtime.ports import reserve_port
from dagrl.workers.sglang import RECEIVE, SglangTrainer
from tests.sglang.sglang_models import as_rank, build, start, weight_updater

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Olmo2ForCausalLM",
    "Glm4MoeForCausalLM",
    "Phi3ForCausalLM",
    "GraniteForCausalLM",
)
TIMEOUT_S = 60.0


def make_model(name: str, seed: int, directory: Path) -> torch.nn.Module:
    """transformers' model with random weights, saved in `directory`."""
    built = getattr(transformers, name)
    config = tiny_config(built.config_class)
    config.architectures = [name]
    model: torch.nn.Module = built(config).to(torch.bfloat16)
    change(model, seed)
    model.save_pretrained(directory)  # type: ignore[operator]
    return model


def change(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in dict.fromkeys([*model.parameters(), *model.buffers()]):
        if tensor.is_floating_point():
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) / 8)


def engine_rank(directory: Path, tp: int, rank: int, connection: Connection) -> None:
    """One rank. Told a message of the trainer, and a checkpoint of the same weights, it counts tensors and equal ones."""
    try:
        start(directory)
        with as_rank(tp, rank):
            model, reference = build(directory), build(directory)
            model.load_weights(iter(read(directory).items()))
            updater = weight_updater(model, rank)
            while (told := connection.recv()) is not None:
                message, checkpoint = told
                done, said = updater.update_weights_from_tensor(message, load_format=RECEIVE)
                assert done, said
                reference.load_weights(iter(read(checkpoint).items()))
                wanted = named_tensors(reference)
                same = [torch.equal(tensor, wanted[name]) for name, tensor in named_tensors(model).items()]
                connection.send((len(same), sum(same)))
    except Exception as error:
        connection.send(error)


def read(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: one for path in sorted(directory.glob("*.safetensors")) for name, one in load_file(path).items()}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_equals_what_sglangs_loader_makes_of_it(name: str, tp: int, tmp_path: Path) -> None:
    model = make_model(name, 0, tmp_path / "started")
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(tp)]
    ranks = [
        context.Process(target=engine_rank, args=(tmp_path / "started", tp, rank, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    checkpoint = tmp_path

    def update(message: list[tuple[str, torch.Tensor]], load_format: str) -> None:
        """As SGLang's scheduler: all ranks get the message."""
        assert load_format == RECEIVE
        for ours, _ in pipes:
            ours.send((message, checkpoint))
        for ours, _ in pipes:
            assert ours.poll(TIMEOUT_S), "a rank hangs"
            found = ours.recv()
            assert not isinstance(found, Exception), found
            tensors, same = found
            assert tensors == same > 5

    meeting = Meeting(f"127.0.0.1:{reserve_port()}", "train", 0, 1, TIMEOUT_S)
    held, tensors = slices_of(model, dtype="bfloat16"), tensors_of(model, dtype="bfloat16")
    trainer = SglangTrainer(meeting, held, tensors, dtype="bfloat16", verify="checksum", update=update)
    try:
        for seed in (1, 2):
            change(model, seed)
            checkpoint = tmp_path / str(seed)
            model.save_pretrained(checkpoint)  # type: ignore[operator]
            trainer.send()
    finally:
        trainer.close()
        for (ours, _), process in zip(pipes, ranks, strict=True):
            ours.send(None)
            process.join(10)
            process.kill()
