"""Holds the weight layout to real Megatron-Core modules; run by test_megatron_weights.py in a process of its own.

Every rank's model is built in turn. What must agree are names and shapes of every parameter and of the router's bias, and
every element: Megatron's own `sharded_state_dict`, with which it writes checkpoints that any other layout can read, says
which box of which global tensor each local tensor holds. The global tensors are those of a single rank that holds the
whole model, so a slice of ours that is cut, ordered or numbered in another way than Megatron's names another element. That
a single rank's tensors are what their Hugging Face names say, `megatron_forward.py` shows by computing with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from dagrl.layout import ParallelLayout
from tests.unit.megatron_models import build_chunks, rank_of, tensors_of
from tests.unit.test_megatron_weights import REAL_CASES
from tests.unit.weight_reference import Config, Weights, filled, hf_weights, megatron_tensors
from workers.families.megatron import MegatronModules
from workers.megatron.weights import megatron_weight_slices

Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Global tensor, where a box begins in it, and its extents."""


def boxes_of(model: torch.nn.Module) -> Iterator[ShardedTensor]:
    """What the model's tensors hold, as Megatron says; their data are views of the live tensors."""
    for value in model.sharded_state_dict().values():
        if isinstance(value, ShardedTensorFactory):
            yield from value.build()
        elif isinstance(value, ShardedTensor):
            yield value


def fill(chunks: Mapping[str, torch.nn.Module], weights: Weights) -> None:
    """Give every tensor of this rank its value; as many as there are, of the same shapes."""
    held = {f"{prefix}{name}": tensor for prefix, chunk in chunks.items() for name, tensor in tensors_of(chunk).items()}
    found = {name: tuple(tensor.shape) for name, tensor in held.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert found == expected, sorted(found.items() ^ expected.items())
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(weights[name])


def global_tensors(config: Config, weights: Weights, modules: MegatronModules) -> Weights:
    """Megatron's global tensors, by their names in checkpoints: what a single rank holds, put where it says."""
    alone = ParallelLayout()
    whole: Weights = {}
    with rank_of(alone, 0):
        chunks = build_chunks(config, alone, modules)
        fill(chunks, megatron_tensors(weights, config, alone, 0, modules))
        for box in boxes_of(chunks[""]):
            whole.setdefault(box.key, torch.full(box.global_shape, torch.nan))[box.global_slice()] = box.data
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def part_of(whole: Weights, box: ShardedTensor) -> torch.Tensor:
    """What the box holds; 0 past the end of a vocabulary, which every layout pads in its own way."""
    known = whole[box.key][box.global_slice()]
    if not box.allow_shape_mismatch:
        return known
    out = torch.zeros(box.local_shape)
    out[: len(known)] = known
    return out


def check(config: Config, layout: ParallelLayout, modules: MegatronModules) -> None:
    """All ranks of a layout hold what our slices say, and together every element of the model."""
    weights = hf_weights(config)
    whole = global_tensors(config, weights, modules)
    replicas: defaultdict[Place, list[tuple[int, ...]]] = defaultdict(list)
    for rank in range(layout.world_size):
        like = megatron_tensors(weights, config, layout, rank, modules)
        with rank_of(layout, rank):
            chunks = build_chunks(config, layout, modules)
            fill(chunks, filled(weights, megatron_weight_slices(config, layout, rank, modules), like))
            boxes = [box for chunk in chunks.values() for box in boxes_of(chunk)]
        assert sum(box.data.numel() for box in boxes) == sum(tensor.numel() for tensor in like.values())
        for box in boxes:
            assert torch.equal(box.data, part_of(whole, box)), (rank, box.key, box.global_offset)
            replicas[box.key, box.global_offset, box.local_shape].append(box.replica_id)
    for place, ids in replicas.items():
        assert len(set(ids)) == len(ids) and sum(not any(one) for one in ids) == 1, (place, ids)


class NotInstalled:
    """Megatron's latent attention asks what is one of Transformer Engine's, also where that is not installed."""


def do_without_gpus() -> None:
    """Megatron's modules are built where there are none."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]


def check_all(cases: Sequence[tuple[Config, ParallelLayout]], modules: MegatronModules) -> None:
    """Every case; one line of output for each."""
    do_without_gpus()
    for config, layout in cases:
        check(config, layout, modules)
        print(config["model_type"], layout.describe(), "agrees", flush=True)


def main() -> None:
    from megatron.core.transformer import multi_latent_attention

    from tests.unit import megatron_forward

    torch.set_num_threads(1)
    multi_latent_attention.TELinear = NotInstalled
    megatron_forward.check_all()
    check_all(REAL_CASES, MegatronModules())


if __name__ == "__main__":
    main()
