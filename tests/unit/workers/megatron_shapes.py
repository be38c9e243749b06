"""Compares the weight layout with real Megatron-Core modules; test_megatron_architecture.py runs it in its own process.

Builds every rank's model in turn. Names, shapes and all elements of every parameter and of the router's bias must agree.
Megatron's own `sharded_state_dict`, with which it writes layout-independent checkpoints, says which box of which global
tensor each local tensor holds. The global tensors come from a single rank with the whole model, so a slice that is sharded,
ordered or numbered differently names another element. That a single rank's tensors match their Hugging Face names is shown
by tests that compare logits with those of transformers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.unit.refit.weight_reference import Config, Weights, filled, hf_weights, megatron_tensors
from tests.unit.workers.megatron_models import build_chunks, rank_of, tensors_of
from tests.unit.workers.test_megatron_architecture import REAL_CASES

Place = tuple[str, tuple[int, ...], tuple[int, ...]]  # global tensor, offset of a box in it, and the box's extents


def boxes_of(model: torch.nn.Module) -> Iterator[ShardedTensor]:
    """Returns Megatron's sharded state; its data are views of the live tensors."""
    for value in model.sharded_state_dict().values():
        if isinstance(value, ShardedTensorFactory):
            yield from value.build()
        elif isinstance(value, ShardedTensor):
            yield value


def fill(chunks: Mapping[str, torch.nn.Module], weights: Weights) -> None:
    """Fills every tensor of this rank; names and shapes must match."""
    held = {f"{prefix}{name}": tensor for prefix, chunk in chunks.items() for name, tensor in tensors_of(chunk).items()}
    found = {name: tuple(tensor.shape) for name, tensor in held.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert found == expected, sorted(found.items() ^ expected.items())
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(weights[name])


def global_tensors(config: Config, weights: Weights) -> Weights:
    """Assembles Megatron's global tensors, by checkpoint name, from a single rank."""
    alone = ParallelLayout()
    whole: Weights = {}
    with rank_of(alone, 0):
        chunks = build_chunks(config, alone)
        fill(chunks, megatron_tensors(weights, config, alone, 0))
        for box in boxes_of(chunks[""]):
            whole.setdefault(box.key, torch.full(box.global_shape, torch.nan))[box.global_slice()] = box.data
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def part_of(whole: Weights, box: ShardedTensor) -> torch.Tensor:
    """Returns the content of a box; 0 past the end of the vocabulary, whose padding depends on the layout."""
    known = whole[box.key][box.global_slice()]
    if not box.allow_shape_mismatch:
        return known
    out = torch.zeros(box.local_shape)
    out[: len(known)] = known
    return out


def check(config: Config, layout: ParallelLayout) -> None:
    """Checks that all ranks of a layout hold what our slices describe, and together every element of the model."""
    weights = hf_weights(config)
    whole = global_tensors(config, weights)
    replicas: defaultdict[Place, list[tuple[int, ...]]] = defaultdict(list)
    for rank in range(layout.world_size):
        like = megatron_tensors(weights, config, layout, rank)
        with rank_of(layout, rank):
            chunks = build_chunks(config, layout)
            fill(chunks, filled(weights, megatron_weight_slices(config, layout, rank), like))
            boxes = [box for chunk in chunks.values() for box in boxes_of(chunk)]
        assert sum(box.data.numel() for box in boxes) == sum(tensor.numel() for tensor in like.values())
        for box in boxes:
            assert torch.equal(box.data, part_of(whole, box)), (rank, box.key, box.global_offset)
            replicas[box.key, box.global_offset, box.local_shape].append(box.replica_id)
    for place, ids in replicas.items():
        assert len(set(ids)) == len(ids) and sum(not any(one) for one in ids) == 1, (place, ids)


class NotInstalled:
    """Megatron's latent attention checks for Transformer Engine classes even if that is not installed."""


def do_without_gpus() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]


def main() -> None:
    from megatron.core.transformer import multi_latent_attention

    torch.set_num_threads(1)
    multi_latent_attention.TELinear = NotInstalled
    do_without_gpus()
    for config, layout in REAL_CASES:
        check(config, layout)
        print(config["model_type"], layout.describe(), "agrees", flush=True)


if __name__ == "__main__":
    main()
