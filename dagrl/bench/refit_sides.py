"""The two sides of a refit benchmark: full-size Megatron-Core and vLLM modules on their ranks' GPUs.

Without a GPU, or if vLLM cannot build a model, tensors of the described shapes replace the modules; the results say so.
Every element's bits follow from its parameter's name and its global index, so that each rank fills and checks its side
without a full tensor anywhere, and independently of how the bytes were sent.
"""

import json
import tempfile
import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from dagrl.bench.refit_cases import RefitCase
from dagrl.config import PolicyConfig
from dagrl.refit.carry.pack import views
from dagrl.refit.fp8 import BLOCK, scale_shape
from dagrl.refit.slices import STACKED, WeightSlice, expand, numbered
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.worker import WorkerContext
from dagrl.workers.megatron import cpu, groups
from dagrl.workers.megatron.architecture import read_architecture
from dagrl.workers.vllm.described import build
from dagrl.workers.vllm.quantization import block_fp8

_STEPS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_SIGN_AND_FRACTION, _EXPONENT = 0x81FF, 0x3C00
"""Bits of a bfloat16 that vary (sign, fraction, two of the exponent) and bits that are set: values from 2^-7 to 2^-3."""


def expected(held: WeightSlice, device: torch.device, aliases: Mapping[str, str] | None = None) -> torch.Tensor:
    """Returns a slice's bfloat16 elements; those of a stack follow from the names of its parameters."""
    name, box = (aliases or {}).get(held.name, held.name), held.box
    names, inner = [name], box
    if STACKED in name:
        names, inner = [numbered(name, number) for number in range(*box[0])], box[1:]
    seeds = [zlib.crc32(one.encode()) for one in names]
    mixed = torch.tensor(seeds, dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(inner):
        mixed = mixed.unsqueeze(-1) + torch.arange(start, stop, dtype=torch.int64, device=device) * _STEPS[dim]
    bits = ((mixed >> 11) ^ mixed) & _SIGN_AND_FRACTION | _EXPONENT
    elements = torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16)
    return elements if STACKED in name else elements[0]


def _parts(tensors: Mapping[str, torch.Tensor], held: WeightSlice, truth: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Returns the live views that hold a slice, each with its expected values."""
    found = views(tensors, held.tensor, held.local, [stop - start for start, stop in held.box])
    return list(zip(found, truth, strict=True)) if STACKED in held.tensor else [(found[0], truth)]


def fill(tensors: Mapping[str, torch.Tensor], slices: Sequence[WeightSlice]) -> None:
    """Writes the contents of a source of `slices`."""
    device = next(iter(tensors.values())).device
    for held in slices:
        parts = _parts(tensors, held, expected(held, device))
        torch._foreach_copy_([part for part, _ in parts], [truth for _, truth in parts])


def clear(tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrites all tensors, so that values found later were written later."""
    for tensor in tensors.values():
        tensor.detach().view(torch.uint8).fill_(0xA5)


def wrong(
    tensors: Mapping[str, torch.Tensor], slices: Sequence[WeightSlice], aliases: Mapping[str, str] | None = None
) -> list[str]:
    """Returns the parameters (or stacks) of `slices` whose destination differs from the expected values in any bit."""
    device = next(iter(tensors.values())).device
    return [held.name for held in slices if not _holds(tensors, held, expected(held, device, aliases))]


def _holds(tensors: Mapping[str, torch.Tensor], held: WeightSlice, truth: torch.Tensor) -> bool:
    if held.scales is None:
        return all(torch.equal(part.view(torch.int16), one.view(torch.int16)) for part, one in _parts(tensors, held, truth))
    quantized, factors = _quantized(truth)
    (part,) = views(tensors, held.tensor, held.local, truth.shape)
    (scale,) = views(tensors, held.scales.tensor, held.scales.local, scale_shape(tuple(truth.shape)))
    return torch.equal(part.view(torch.uint8), quantized.view(torch.uint8)) and torch.equal(scale, factors)


def _quantized(truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `truth` to e4m3 in blocks of 128x128 with float32 scales; float64 makes each operation round once.

    On GPUs torch divides by a number by multiplying with its inverse, which may be off by one in the last place.
    """
    *lead, rows, columns = truth.shape
    down, right = scale_shape((rows, columns))
    padded = torch.nn.functional.pad(truth, (0, right * BLOCK - columns, 0, down * BLOCK - rows))
    blocks = padded.view(*lead, down, BLOCK, right, BLOCK).float()
    peaks = blocks.abs().amax((-3, -1), keepdim=True).clamp(1e-4)
    factors = (peaks.double() / 448).float()
    quantized = (blocks * (1 / factors.double()).float()).to(torch.float8_e4m3fn)
    return quantized.view(padded.shape)[..., :rows, :columns].contiguous(), factors.view(*lead, down, right)


def described(slices: Sequence[WeightSlice], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns uninitialized tensors of the sizes in `slices`."""
    sizes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for one in expand(slices):
        held = [(one.tensor, one.local, getattr(torch, one.dtype or "bfloat16"))]
        held += [(one.scales.tensor, one.scales.local, torch.float32)] if one.scales else []
        for name, local, dtype in held:
            ends = tuple(stop for _, stop in local)
            sizes[name], dtypes[name] = tuple(map(max, ends, sizes.get(name, ends))), dtype
    return {name: torch.empty(size, dtype=dtypes[name], device=device) for name, size in sizes.items()}


@dataclass
class Side:
    """One rank's tensors, by the names in `slices`, who holds them, and model and configuration if they are vLLM's."""

    slices: Sequence[WeightSlice]
    tensors: Mapping[str, torch.Tensor]
    holder: str
    model: Any = None
    config: Any = None


def modules_side(slices: Sequence[WeightSlice], model: Any) -> Side:
    """Returns the parameters of `model`, from `megatron_model`, that `slices` name."""
    return Side(slices, named_tensors(slices, model.parameters()), "Megatron-Core modules")


def megatron_model(case: RefitCase, layout: ParallelLayout, rank: int, address: str, device: torch.device) -> Any:
    """Builds the model of rank `rank` of `layout`. Collective; the ranks meet at `address` and leave their groups
    afterwards."""
    cpu.adapt()
    from dagrl.workers.megatron.model import build_model

    policy = PolicyConfig(model_name=case.model, precision="bfloat16")
    groups.start_groups(WorkerContext("train", rank, layout), address, 0)
    try:
        return build_model(read_architecture(case.config), policy, layout, device)
    finally:
        groups.end_groups()


def vllm_side(case: RefitCase, rank: int, slices: Sequence[WeightSlice], device: torch.device) -> Side:
    """Returns this generation rank's vLLM modules, with the parameters that vLLM's own loader fills."""
    try:
        model, config = _vllm_model(case, rank, device)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return Side(slices, named_tensors(slices, parameters), "vLLM modules", model, config)
    except Exception:
        reason = traceback.format_exc().strip().splitlines()[-1]
        return Side(slices, described(slices, device), f"tensors of vLLM's shapes (its modules: {reason})")


def _vllm_model(case: RefitCase, rank: int, device: torch.device) -> tuple[Any, Any]:
    """Builds one rank's model alone, and returns it with its configuration."""
    directory = Path(tempfile.mkdtemp())
    changes: dict[str, Any] = (
        {"quantization_config": block_fp8(cast(int, case.config["num_hidden_layers"]))} if case.fp8 else {}
    )
    (directory / "config.json").write_text(json.dumps({**case.config, **changes, "dtype": "bfloat16"}))
    options = {"max_model_len": 1024, "enable_expert_parallel": case.expert_parallel}
    return build(directory, case.tp, rank, torch.bfloat16, device, **options)


def named_tensors(slices: Sequence[WeightSlice], parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors that `slices` name. Raises KeyError if the modules lack one."""
    names = dict.fromkeys(held.tensor for one in expand(slices) for held in (one, one.scales) if held is not None)
    missing = sorted(names.keys() - parameters.keys())
    if missing:
        raise KeyError(f"the modules lack {missing[:4]}; they have {sorted(parameters)[:8]}")
    return {name: parameters[name] for name in names}
