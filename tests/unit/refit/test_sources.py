"""Slices of modules: what DTensors hold against `full_tensor()`, and names and views against what transformers saves."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dagrl.config import PolicyConfig
from dagrl.errors import RefitPlanError
from dagrl.refit.carry.pack import Addresses
from dagrl.refit.slices import WeightSlice, expand, volume
from dagrl.refit.sources import slices_of, tensors_of
from dagrl.workers.fsdp.dry import check_files
from tests.families import FAMILIES


def part_of(tensors: Mapping[str, Tensor], one: WeightSlice) -> Tensor:
    return tensors[one.tensor][tuple(slice(*extent) for extent in one.local)]


def check_held(module: nn.Module, whole: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Every slice holds its box of the whole parameter. Returns how often this rank holds each element."""
    tensors = tensors_of(module, dtype="float32", **options)
    held = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}
    for one in expand(slices_of(module, dtype="float32", **options)):
        box = tuple(slice(*extent) for extent in one.box)
        wanted = whole[one.name][box]
        assert volume(one.box) and torch.equal(part_of(tensors, one).reshape(wanted.shape), wanted), one
        held[one.name][box] += 1
    return held


def test_fsdp_over_rows_that_tensor_parallelism_does_not_divide() -> None:
    """FSDP2 cuts what each tensor-parallel rank holds: 4 and 3 of 7 rows, for three ranks."""
    whole = torch.arange(14.0).view(7, 2)
    held = torch.zeros(7, 2, dtype=torch.int64)
    for rank in range(6):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        mesh = DeviceMesh("cpu", torch.arange(6).view(3, 2))
        local = [*whole.chunk(2)[rank % 2].chunk(3), whole[:0]][rank // 2]
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        placed = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        module = nn.Module()
        module.register_buffer("weight", placed)  # as a parameter, torch would give it the mesh of rank 0
        held += check_held(module, {"weight": whole})["weight"]
        dist.destroy_process_group()
    assert (held == 1).all()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "mixtral"])
def test_transformers_models_are_described_as_they_are_saved(family: str, tmp_path: Path) -> None:

    config = dict(FAMILIES[family])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(tmp_path)
    saved = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name, held in check_held(model, saved).items():
        assert (held == 1).all(), name
    model.__class__ = type(f"FSDP{type(model).__name__}", (FSDPModule, type(model)), {})  # as `fully_shard` does
    check_held(model, saved)


def test_experts_that_transformers_transposes_are_described_as_published(tmp_path: Path) -> None:
    """Qwen3-VL-MoE, of which vLLM reads the published order alone, and transformers both."""

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    text = {**sizes, "num_hidden_layers": 1, "vocab_size": 32, "num_experts": 2, "moe_intermediate_size": 24, "head_dim": 8}
    ropes = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 1e4}
    vision = {**sizes, "depth": 1, "num_heads": 2, "out_hidden_size": 16, "deepstack_visual_indexes": [0]}
    text |= {"num_key_value_heads": 2, "num_experts_per_tok": 1, "rope_parameters": ropes, "pad_token_id": None}
    config = AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    own = [name for name in saved if ".experts." in name]
    published = saved | {name: saved[name].transpose(1, 2).contiguous() for name in own}
    for name, held in check_held(model, published).items():
        assert (held == 1).all(), name
    for tensors in (saved, published):
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        check_files(PolicyConfig(model_name=str(tmp_path)), json.loads((tmp_path / "config.json").read_text()))
        read = dict(AutoModelForImageTextToText.from_pretrained(tmp_path).named_parameters())
        assert all(torch.equal(read[name], parameter) for name, parameter in model.named_parameters())
    assert len(own) == 2 and published[own[0]].shape != saved[own[0]].shape


FORM = "transformer_engine.pytorch.tensor.float8_tensor"
Float8Tensor = type("Float8Tensor", (Tensor,), {"__module__": FORM})  # of which only the class matters


def test_tensors_in_a_form_of_their_own_are_refused() -> None:
    module = nn.Module()
    module.register_buffer("weight", torch.zeros(2, 2).as_subclass(Float8Tensor))
    with pytest.raises(RefitPlanError, match=r"'weight' is a transformer_engine.* master weights"):
        slices_of(module, dtype="float32")


def test_conversions_that_interleave_or_transpose() -> None:
    weight, other = torch.arange(48.0).view(8, 6), torch.arange(30.0).view(3, 5, 2)

    def to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
        rope = state["weight"].view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6)
        return {"q": rope, "experts": state["other"].transpose(1, 2).contiguous()}

    saved = to_hf({"weight": weight, "other": other})
    for held in check_held(nn.ParameterDict({"weight": weight, "other": other}), saved, to_hf=to_hf).values():
        assert (held == 1).all()


def test_joined_parameters_are_sent_from_where_they_are() -> None:
    whole = nn.ParameterDict({"query": torch.randn(6, 4), "key": torch.randn(2, 4), "bias": torch.randn(4, 3)})

    def to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
        both = torch.cat([state["query"], torch.cat([state["key"], state["key"][:1]])])
        return {"qk": both, "wide": torch.cat([state["bias"].T, state["query"][1:4]], dim=-1), "bias": state["bias"]}

    expected = {name: tensor.detach() for name, tensor in to_hf(dict(whole.named_parameters())).items()}
    assert all((times == 1).all() for times in check_held(whole, expected, to_hf=to_hf).values())
    for part in (lambda joined: joined[3:], lambda joined: joined.view(4, 8), lambda joined: joined.flatten()):
        with pytest.raises(RefitPlanError, match="'part' of the checkpoint is computed"):
            slices_of(whole, dtype="float32", to_hf=lambda s: {"part": part(torch.cat([s["query"], s["key"]]))})  # noqa: B023


def test_tied_parameters_once_and_other_dtypes_by_name() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    module.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16))
    named = {one.name: one.dtype for one in slices_of(module, dtype="float32")}
    assert named == {"embed.weight": "", "scale": "bfloat16"}


def test_computed_parameters_are_refused() -> None:
    with pytest.raises(RefitPlanError, match="'sum' of the checkpoint is computed"):
        slices_of(
            nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)}),
            dtype="float32",
            to_hf=lambda s: {"sum": s["a"] + s["b"]},
        )


@pytest.mark.parametrize("change", [lambda w: w.mul_(2), lambda w: w[:1].zero_(), lambda w: torch.add(w, 1, out=w)])
@pytest.mark.parametrize("of", [lambda w: w, lambda w: w.clone(), lambda w: torch.cat([w, w]), lambda w: w.T.contiguous()])
def test_conversions_in_place_are_refused(change: Callable[[Tensor], Tensor], of: Callable[[Tensor], Tensor]) -> None:
    def to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = of(state["a"])
        change(weight)
        return {"a": weight}

    with pytest.raises(RefitPlanError, match="'a' of the checkpoint is computed"):
        slices_of(nn.ParameterDict({"a": torch.ones(3, 2)}), dtype="float32", to_hf=to_hf)


def test_tensors_follow_parameters_to_new_memory() -> None:
    """Offloading gives a parameter other data; a sender that kept the old memory would send old weights."""
    module = nn.Sequential(nn.Linear(3, 2))
    tensors = tensors_of(module, dtype="float32", to_hf=lambda state: {"w": state["0.weight"].T, "b": state["0.bias"]})
    known = Addresses(tensors, tensors)
    module[0].weight.data = torch.ones(2, 3)
    assert known.moved and sorted(map(len, tensors.values())) == [2, 3]
    module.double()
    assert all(torch.equal(one, module[0].weight.T if one.dim() == 2 else module[0].bias) for one in tensors.values())
