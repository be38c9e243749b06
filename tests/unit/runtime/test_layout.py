"""ParallelLayout against Megatron-Core's `RankGenerator`: the place of every rank in its groups, for any sizes."""

import warnings
from collections import defaultdict
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dagrl.errors import LayoutError
from dagrl.runtime.layout import Coordinates, ParallelLayout

with suppress(ImportError), warnings.catch_warnings():  # here, as 0.19 starts a process on its first import
    warnings.simplefilter("ignore")
    import megatron.core.parallel_state  # noqa: F401

ORDER = "tp-cp-ep-dp-pp"  # the default of megatron.core.parallel_state.initialize_model_parallel

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    dp, pp, tp, cp = draw(SIZES), draw(SIZES), draw(SIZES), draw(SIZES)
    stage = dp * tp * cp
    etp = draw(st.none() | st.sampled_from([size for size in range(1, stage + 1) if stage % size == 0]))
    per_expert = stage // (tp if etp is None else etp)
    ep = draw(st.sampled_from([size for size in range(1, per_expert + 1) if per_expert % size == 0]))
    vpp = draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1
    return ParallelLayout(dp=dp, pp=pp, tp=tp, cp=cp, ep=ep, etp=etp, vpp=vpp)


def rank_generator(**sizes: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = pytest.importorskip("megatron.core.parallel_state")
    return state.RankGenerator(**sizes, order=ORDER)


def dense_generator(layout: ParallelLayout) -> Any:
    """As `initialize_model_parallel` makes it for dense weights."""
    return rank_generator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp)


def expert_generator(layout: ParallelLayout) -> Any:
    """As `initialize_model_parallel` makes it for experts: no context parallelism, data parallel with what is left."""
    etp = layout.tp if layout.etp is None else layout.etp
    edp = layout.world_size // (etp * layout.ep * layout.pp)
    return rank_generator(tp=etp, ep=layout.ep, dp=edp, pp=layout.pp, cp=1)


@given(layouts())
def test_a_coordinate_is_the_position_in_megatrons_group(layout: ParallelLayout) -> None:
    megatron, experts = dense_generator(layout), expert_generator(layout)
    assert megatron.world_size == layout.world_size
    found: dict[int, dict[str, int]] = defaultdict(dict)
    dense, of_experts = {name: name for name in ("tp", "cp", "dp", "pp")}, {"tp": "etp", "ep": "ep", "dp": "edp"}
    for generator, names in ((megatron, dense), (experts, of_experts)):
        for token, name in names.items():
            for group in generator.get_ranks(token):
                for position, rank in enumerate(group):
                    found[rank][name] = position
    for rank in range(layout.world_size):
        assert layout.coordinates(rank) == Coordinates(**found[rank])
    assert all(layout.rank(**{name: at[name] for name in dense}) == rank for rank, at in found.items())


@given(layouts())
def test_a_shard_is_megatrons_model_parallel_group_stage_by_stage(layout: ParallelLayout) -> None:
    shards = [layout.shard(dp) for dp in range(layout.dp)]
    assert sorted(map(sorted, shards)) == sorted(dense_generator(layout).get_ranks("tp-cp-pp"))
    for dp, shard in enumerate(shards):
        assert len(shard) == layout.shard_size
        assert all(layout.coordinates(rank).dp == dp for rank in shard)
        stages = [layout.coordinates(rank).pp for rank in shard]
        assert stages == sorted(stages)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 0}, "dp is 0"),
        ({"tp": -1}, "tp is -1"),
        ({"etp": 0}, "etp is 0"),
        ({"tp": 2, "dp": 2, "ep": 3}, "etp 2 x ep 3 does not divide the 4 workers"),
        ({"tp": 2, "etp": 4}, "etp 4 x ep 1 does not divide the 2 workers"),
        ({"vpp": 2}, "vpp is 2 but pp is 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        ParallelLayout(**sizes)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} is outside a layout of 4 workers"):
        ParallelLayout(dp=2, tp=2).coordinates(rank)


def test_description_names_the_sizes_that_matter() -> None:
    assert ParallelLayout().describe() == "single"
    assert ParallelLayout(dp=2, pp=2, tp=2, vpp=2).describe() == "dp2 pp2 tp2 vpp2"
    assert ParallelLayout(dp=2, tp=2, ep=2, etp=1).describe() == "dp2 tp2 ep2 etp1"
