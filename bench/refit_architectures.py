"""Refits every architecture that the installed vLLM can build at tiny size, and compares with vLLM's own `load_weights`.

    dagrl bench refit_architectures --json F                     all text and multimodal architectures
    dagrl bench refit_architectures --names Gemma3ForCausalLM    some of them

For each architecture transformers builds a tiny model with random weights, and vLLM builds its own from the saved
configuration. vLLM's loader is recorded. The weights of a second checkpoint are then refitted over a Gloo channel, from the
plain module (`hf`) and from its two FSDP2 shards (`dtensor`). Afterwards every parameter and buffer must be bit-equal to
what `load_weights` makes of that checkpoint. Each architecture has processes of its own, forked from one that has imported
vLLM, with a deadline.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.bench.tiny_configs import NoTinyConfigError, tiny_model

if TYPE_CHECKING:
    import torch

    from dagrl.refit import RefitPlan, WeightSlice
    from dagrl.workers.vllm.recording import Recording

SOURCES = ("hf", "dtensor")
SHARDS = 2


@dataclass(frozen=True)
class ArchitectureRow:
    """One refit: whether all of vLLM's tensors are bit-equal to the loader's, otherwise the reason."""

    architecture: str
    source: str
    passed: bool
    reason: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dagrl bench refit_architectures`."""
    parser.add_argument("--json", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--names", nargs="*", help="architectures (default: all that vLLM lists for text and images)")
    parser.add_argument("--seconds", type=float, default=120, help="deadline of one architecture")


def run(options: argparse.Namespace) -> None:
    """Tries all architectures, prints a line for each row and writes the requested file."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    import torch

    from dagrl.workers.vllm.launch import import_vllm

    torch.set_num_threads(1)
    import_vllm({})
    rows: list[ArchitectureRow] = []
    for name in options.names or architectures():
        for row in try_architecture(name, options.seconds):
            rows.append(row)
            sys.stdout.write(f"{'passed' if row.passed else 'FAILED':7} {row.architecture} from {row.source} {row.reason}\n")
            sys.stdout.flush()
        if options.json:
            text = ",\n".join(json.dumps(asdict(row)) for row in rows)
            options.json.write_text(f"[\n{text}\n]\n")
    sys.stdout.write(f"{sum(row.passed for row in rows)} of {len(rows)} passed\n")


def architectures() -> list[str]:
    """Returns vLLM's architectures of text generation, then the multimodal ones."""
    from vllm.model_executor.models import registry

    return [*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS]


def try_architecture(name: str, seconds: float) -> list[ArchitectureRow]:
    """Returns a row for each source. A crash or a hang is a reason like any other."""
    with tempfile.TemporaryDirectory() as root:
        reason = _forked(_refit_all, (name, Path(root)), seconds)
        report = Path(root, "rows.json")
        done = {row["source"]: ArchitectureRow(**row) for row in json.loads(report.read_text())} if report.exists() else {}
    return [done.get(source, ArchitectureRow(name, source, False, reason)) for source in SOURCES]


def _forked(target: Callable[..., None], arguments: tuple[Any, ...], seconds: float | None = None) -> str:
    """Runs `target` in a forked process. Returns why it failed; empty after success.

    With a deadline it is the first of a group of processes, which all end with it.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_told, args=(target, arguments, writer, seconds is not None))
    process.start()
    writer.close()
    process.join(seconds)
    if process.is_alive() and process.pid:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return f"not done after {seconds:.0f} s"
    try:
        return str(reader.recv())
    except EOFError:
        return f"the process ended with {process.exitcode}"


def _told(target: Callable[..., None], arguments: tuple[Any, ...], writer: Any, leads: bool) -> None:
    if leads:
        os.setpgrp()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    reason = ""
    try:
        target(*arguments)
    except Exception as error:
        reason = _reason(error)
    writer.send(reason)
    os._exit(0)  # without the exit handlers of the parent


def _reason(error: BaseException) -> str:
    message = " ".join(str(error).split())[:300]
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    at = "" if where is None else f" ({Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno})"
    return message if isinstance(error, NoTinyConfigError) else f"{type(error).__name__}: {message}{at}"


def _refit_all(name: str, root: Path) -> None:
    """Writes `rows.json` in `root`, with a row for each source as soon as it is done."""
    import torch

    from dagrl.workers.vllm.launch import import_vllm
    from dagrl.workers.vllm.recording import record

    first, second = root / "first", root / "second"
    for seed, directory in enumerate((first, second)):
        tiny_model(name, seed).save_pretrained(directory)  # type: ignore[operator]
    parts = {"hf": _tried(_whole, name), "dtensor": _tried(_shards, name, root)}  # before vLLM makes its process groups
    import_vllm({"architectures": [name]})
    model = build(first)
    weights = _read(second)
    model.load_weights(iter(weights.items()))  # type: ignore[operator]
    wanted = {key: tensor.clone() for key, tensor in _tensors(model).items()}
    rows: list[ArchitectureRow] = []
    for source in SOURCES:
        held = parts[source]
        try:
            if isinstance(held, Exception):
                raise held
            model.load_weights(iter(_read(first).items()))  # type: ignore[operator]
            found = record(model, [(key, tuple(one.shape), one.dtype) for key, one in weights.items()], torch.bfloat16)
            refit_into(model, found, held)
            wrong = [key for key, tensor in _tensors(model).items() if not _equal(tensor, wanted[key])]
            reason = f"tensors that differ from load_weights: {len(wrong)}, such as {', '.join(wrong[:3])}" if wrong else ""
        except Exception as error:
            reason = _reason(error)
        rows.append(ArchitectureRow(name, source, not reason, reason))
        (root / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))


Part = tuple["list[WeightSlice]", "dict[str, torch.Tensor]"]
"""What one rank of the source holds."""


def _tried(describe: Callable[..., list[Part]], *arguments: Any) -> list[Part] | Exception:
    try:
        return describe(*arguments)
    except Exception as error:
        return error


def _whole(name: str) -> list[Part]:
    from dagrl.refit.sources import slices_of, tensors_of

    model = tiny_model(name, seed=1)
    return [(slices_of(model, dtype="bfloat16"), tensors_of(model, dtype="bfloat16"))]


def _shards(name: str, root: Path) -> list[Part]:
    """Returns the FSDP2 shards, each made in a process that is one rank of a world without peers."""
    import torch

    parts = []
    for rank in range(SHARDS):
        path = root / f"shard{rank}.pt"
        if reason := _forked(_write_shard, (name, path, rank)):
            raise RuntimeError(f"FSDP2: {reason}")
        parts.append(torch.load(path, weights_only=False))
    return parts


def _write_shard(name: str, path: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dagrl.refit.sources import slices_of, tensors_of

    dist.init_process_group("fake", rank=rank, world_size=SHARDS, store=FakeStore())
    model = tiny_model(name, seed=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (SHARDS,)))
    torch.save((slices_of(model, dtype="bfloat16"), tensors_of(model, dtype="bfloat16")), path)


def build(directory: Path) -> torch.nn.Module:
    """Returns vLLM's model for a checkpoint's configuration, without weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    plain = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 64}
    config = EngineArgs(model=str(directory), **plain).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        parallel_state.init_distributed_environment(1, 0, f"file://{directory}/store{os.getpid()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        model: torch.nn.Module = initialize_model(config)
    return model


def refit_into(model: torch.nn.Module, found: Recording, parts: Sequence[Part]) -> None:
    """Refits `model` from `parts` over a Gloo channel, as recorded."""
    import torch

    from dagrl.refit import expand, plan_refit
    from dagrl.workers.vllm.destinations import check_complete

    check_complete(type(model).__name__, found)
    inputs = {
        name: torch.empty(0, dtype=dtype).new_empty_strided(where.shape, where.strides)
        for one in found.computations
        for name, (where, dtype) in one.inputs.items()
    }
    live = {**_tensors(model), **inputs}
    live |= {name: arranged.of(live[arranged.tensor]) for name, arranged in found.arranged.items()}
    needed = {one.name for one in expand(found.slices)}
    sources = [[one for one in slices if any(part.name in needed for part in expand([one]))] for slices, _ in parts]
    plan = plan_refit(sources, [found.slices], dtype="bfloat16")
    carry(plan, [*(tensors for _, tensors in parts), live])
    targets = _tensors(model)
    for one in found.computations:
        view = targets[one.parameter].as_strided(one.target.shape, one.target.strides, one.target.offset)
        view.copy_(one.compute(inputs))


def carry(plan: RefitPlan, tensors: Sequence[dict[str, torch.Tensor]]) -> None:
    """Runs a refit with all ranks in threads of this process; the last rank receives."""
    import torch

    from dagrl.channels import ChannelSpec, open_channel
    from dagrl.refit import RefitReceiver, RefitSender
    from dagrl.runtime.worker_group import free_address

    address = free_address(None)
    last = plan.size - 1

    def rank(number: int) -> None:
        channel = open_channel(ChannelSpec("gloo", address, number, plan.size, 60.0))
        mine = plan.for_rank(number, "off", "auto")
        with torch.inference_mode(False), torch.no_grad():
            if number == last:
                RefitReceiver(mine, tensors[number], channel).receive(1)
            else:
                RefitSender(mine, tensors[number], channel).send(1)
        channel.close()

    with ThreadPoolExecutor(plan.size) as pool:
        list(pool.map(rank, range(plan.size)))


def _read(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: one for path in sorted(directory.glob("*.safetensors")) for name, one in load_file(path).items()}


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named: Iterable[tuple[str, torch.Tensor]] = model.named_parameters(remove_duplicate=False)
    return {name: one.detach() for name, one in (*named, *model.named_buffers(remove_duplicate=False))}


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    import torch

    return torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))
