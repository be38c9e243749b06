"""Refits every architecture that the installed vLLM can build at tiny size, and compares with vLLM's own `load_weights`.

    dagrl bench refit --architectures --json F                     all text and multimodal architectures
    dagrl bench refit --architectures --names Gemma3ForCausalLM    some of them

For each architecture transformers builds a tiny model with random weights, and vLLM builds its own from the saved
configuration, on one rank and on two tensor-parallel ones. vLLM's loader is recorded. The weights of a second checkpoint are
then refitted over a Gloo channel, from the plain module (`hf`), from its two FSDP2 shards (`dtensor`), and from Megatron's
modules at TP2 (`megatron`) where dagrl trains the family. Afterwards every parameter and buffer must be bit-equal to what
`load_weights` makes of that checkpoint. Each architecture has processes of its own, forked from one that has imported vLLM,
with a deadline. Shards are made in forked processes, each one rank of a world without peers. Some image processors need
torchvision.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dagrl.bench.forked import reason_of, run_forked
from dagrl.bench.tiny_configs import NoTinyConfigError, tiny_model
from dagrl.channels import ChannelSpec, open_channel
from dagrl.refit import RefitPlan, RefitReceiver, RefitSender, WeightSlice, expand, plan_refit
from dagrl.refit.recording import Recorded, Recording, check_complete, named_tensors, record
from dagrl.refit.sources import slices_of, tensors_of, transposed_back
from dagrl.runtime.worker_group import free_address
from dagrl.workers.families.decoder import MODEL_TYPES
from dagrl.workers.vllm.described import as_rank, build, do_without_kernels
from dagrl.workers.vllm.launch import import_vllm

SHARDS = 2

Part = tuple[list[WeightSlice], Mapping[str, torch.Tensor]]  # what one rank of the source holds
TENSOR_PARALLEL = (1, 2)  # sizes of the engines

T = TypeVar("T")


def megatron_trains(directory: Path) -> bool:
    """Whether dagrl's Megatron worker trains models with the checkpoint's configuration."""
    return json.loads((directory / "config.json").read_text())["model_type"] in MODEL_TYPES


def whole(name: str, directory: Path) -> list[Part]:
    """Returns the parts of a plain module."""
    model = tiny_model(name, seed=1)
    return [(slices_of(model, dtype="bfloat16"), tensors_of(model, dtype="bfloat16"))]


def _sharded(write: Callable[..., None], name: str, directory: Path) -> list[Part]:
    parts = []
    for rank in range(SHARDS):
        path = directory / f"{write.__name__}{rank}.pt"
        if reason := run_forked(write, (name, directory, path, rank)):
            raise RuntimeError(reason)
        parts.append(torch.load(path, weights_only=False))
    return parts


def _join_world(rank: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=SHARDS, store=FakeStore())


def _write_fsdp_shard(name: str, directory: Path, path: Path, rank: int) -> None:
    _join_world(rank)
    model = tiny_model(name, seed=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (SHARDS,)))
    torch.save((slices_of(model, dtype="bfloat16"), dict(tensors_of(model, dtype="bfloat16"))), path)


def _write_megatron_shard(name: str, directory: Path, path: Path, rank: int) -> None:
    from megatron.core import parallel_state

    from dagrl.config import PolicyConfig
    from dagrl.runtime.layout import ParallelLayout
    from dagrl.workers.megatron import cpu
    from dagrl.workers.megatron.architecture import read_architecture
    from dagrl.workers.megatron.groups import parallel_sizes
    from dagrl.workers.megatron.model import build_model
    from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes
    from dagrl.workers.train.hf_load import load_hf, read_hf_config

    cpu.adapt()
    _join_world(rank)
    layout = ParallelLayout(tp=SHARDS)
    parallel_state.initialize_model_parallel(**parallel_sizes(layout), create_gloo_process_groups=False)
    config: dict[str, Any] = read_hf_config(directory)
    policy = PolicyConfig(model_name=name, precision="bfloat16")
    tensors = build_model(read_architecture(config), policy, layout, torch.device("cpu")).tensors()
    slices = megatron_weight_slices(config, layout, rank)
    load_hf(directory, slices, parameter_shapes(config), tensors)
    torch.save((slices, {key: tensor.clone() for key, tensor in tensors.items()}), path)


SOURCES: Mapping[str, Callable[[str, Path], list[Part]]] = {
    "hf": whole,
    "dtensor": partial(_sharded, _write_fsdp_shard),
    "megatron": partial(_sharded, _write_megatron_shard),
}
"""What makes the parts of a model from its name and the directory of its checkpoint: a plain module, its FSDP2 shards, or
Megatron's modules at TP2."""


@dataclass(frozen=True)
class ArchitectureRow:
    """One refit: whether all of vLLM's tensors are bit-equal to the loader's, otherwise the reason."""

    architecture: str
    source: str
    tp: int
    passed: bool
    reason: str = ""


@dataclass(frozen=True)
class EngineRank:
    """One rank of an engine: its model, the recording of its loader, and what that loader makes of the second checkpoint."""

    model: torch.nn.Module
    found: Recording
    wanted: Mapping[str, torch.Tensor]
    reset: Callable[[], object]


def run(options: argparse.Namespace) -> None:
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    torch.set_num_threads(1)
    import_vllm({})
    from vllm.model_executor.models import registry

    rows: list[ArchitectureRow] = []
    for name in options.names or [*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS]:
        for row in try_architecture(name, options.seconds):
            rows.append(row)
            sys.stdout.write(
                f"{'passed' if row.passed else 'FAILED':7} {row.architecture} from {row.source} to TP{row.tp} {row.reason}\n"
            )
            sys.stdout.flush()
        if options.json:
            text = ",\n".join(json.dumps(asdict(row)) for row in rows)
            options.json.write_text(f"[\n{text}\n]\n")
    sys.stdout.write(f"{sum(row.passed for row in rows)} of {len(rows)} passed\n")


def try_architecture(name: str, seconds: float) -> list[ArchitectureRow]:
    """Returns a row for each source and engine. A crash or a hang is a reason like any other."""
    with tempfile.TemporaryDirectory() as root:
        reason = run_forked(_refit_all, (name, Path(root)), seconds)
        report = Path(root, "rows.json")
        rows = [ArchitectureRow(**row) for row in json.loads(report.read_text())] if report.exists() else []
    done = {(row.source, row.tp) for row in rows}
    wanted = [(source, tp) for tp in TENSOR_PARALLEL for source in ("hf", "dtensor")]
    return rows + [ArchitectureRow(name, source, tp, False, reason) for source, tp in wanted if (source, tp) not in done]


def _refit_all(name: str, root: Path) -> None:
    """Writes `rows.json` in `root`, with a row for each source and engine as soon as it is done."""
    first, second = root / "first", root / "second"
    for seed, directory in enumerate((first, second)):
        with transposed_back():
            tiny_model(name, seed).save_pretrained(directory)  # type: ignore[operator]
    sources = [source for source in SOURCES if source != "megatron" or megatron_trains(second)]
    parts = {source: _tried(SOURCES[source], name, second) for source in sources}  # before vLLM makes its process groups
    import_vllm({"architectures": [name]})
    do_without_kernels()
    rows: list[ArchitectureRow] = []
    for tp in TENSOR_PARALLEL:
        ranks = _tried(_engine, first, second, tp)
        for source in sources:
            rows.append(_row(name, source, tp, parts[source], ranks))
            (root / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))


def _row(
    name: str, source: str, tp: int, parts: list[Part] | Exception, ranks: list[EngineRank] | Exception
) -> ArchitectureRow:
    wrong: Any = next((failed for failed in (parts, ranks) if isinstance(failed, Exception)), None)
    wrong = _tried(_refit, ranks, parts) if wrong is None else wrong
    if isinstance(wrong, list) and wrong:
        wrong = f"tensors that differ from load_weights: {len(wrong)}, such as {', '.join(wrong[:3])}"
    return ArchitectureRow(name, source, tp, not wrong, str(wrong or ""))


def _tried(work: Callable[..., T], *arguments: Any) -> T | Exception:
    """Returns what `work` returns, or an error with the reason why it failed."""
    try:
        return work(*arguments)
    except Exception as error:
        return RuntimeError(str(error) if isinstance(error, NoTinyConfigError) else reason_of(error))


def _engine(first: Path, second: Path, tp: int) -> list[EngineRank]:
    return [_engine_rank(first, second, tp, rank) for rank in range(tp)]


def _engine_rank(first: Path, second: Path, tp: int, rank: int) -> EngineRank:
    model, _ = build(first, tp, rank, torch.bfloat16)
    weights = _read(second)
    loaded = model.load_weights(iter(weights.items()))  # type: ignore[operator]
    wanted = {key: tensor.clone() for key, tensor in named_tensors(model).items()}

    def reset() -> None:
        as_rank(tp, rank)
        model.load_weights(iter(_read(first).items()))  # type: ignore[operator]

    reset()
    found = record(model, [(key, tuple(one.shape), one.dtype) for key, one in weights.items()], torch.bfloat16)
    lacking = sorted(found.unwritten.keys() - loaded) if isinstance(loaded, set) else []
    if lacking:
        raise NoTinyConfigError(f"vLLM itself rejects this checkpoint: it does not fill {', '.join(lacking[:2])}")
    check_complete(type(model).__name__, found)
    return EngineRank(model, found, wanted, reset)


def _refit(ranks: Sequence[EngineRank], parts: Sequence[Part]) -> list[str]:
    """Refits all ranks from `parts` over a Gloo channel, as recorded. Returns the tensors that differ from the loader's."""
    for rank in ranks:
        rank.reset()
    ends = [Recorded(rank.found, named_tensors(rank.model)) for rank in ranks]
    needed = {one.name for rank in ranks for one in expand(rank.found.slices)}
    sources = [[one for one in slices if any(part.name in needed for part in expand([one]))] for slices, _ in parts]
    plan = plan_refit(sources, [rank.found.slices for rank in ranks], dtype="bfloat16")
    carry(plan, [*(tensors for _, tensors in parts), *(end.tensors for end in ends)], len(parts))
    wrong = []
    for number, (rank, end) in enumerate(zip(ranks, ends, strict=True)):
        end.compute()
        targets = named_tensors(rank.model)
        wrong += [f"{key} of rank {number}" for key, tensor in targets.items() if not _equal(tensor, rank.wanted[key])]
    return wrong


def carry(plan: RefitPlan, tensors: Sequence[Mapping[str, torch.Tensor]], senders: int) -> None:
    """Runs a refit with all ranks in threads of this process; the first `senders` ranks send."""
    address = free_address(None)

    def rank(number: int) -> None:
        channel = open_channel(ChannelSpec("gloo", address, number, plan.size, 60.0))
        mine = plan.for_rank(number)
        with torch.inference_mode(False), torch.no_grad():
            if number >= senders:
                RefitReceiver(mine, tensors[number], channel).receive(1)
            else:
                RefitSender(mine, tensors[number], channel).send(1)
        channel.close()

    with ThreadPoolExecutor(plan.size) as pool:
        list(pool.map(rank, range(plan.size)))


def _read(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: one for path in sorted(directory.glob("*.safetensors")) for name, one in load_file(path).items()}


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))
