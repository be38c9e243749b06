"""Recordings of loaders, and what a refit writes in an engine and runs after it."""

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from dagrl.errors import CheckpointError, ConfigError
from dagrl.refit.recording import Recording, check_complete, named_tensors, record
from dagrl.refit.slices import expand
from dagrl.workers.vllm.destinations import find_destinations
from dagrl.workers.vllm.loader import LoadedModel, LoadedParameter

Load = Callable[["Model", Tensor], object]


class Model(torch.nn.Module):
    """One parameter, and a loader of one checkpoint parameter into it."""

    def __init__(self, shape: tuple[int, ...], load: Load, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            self.load(self, weight)


def refitted(model: Model, source: Tensor, found: Recording) -> Tensor:
    """Returns the parameter as written by the recorded slices and computations."""
    parameter = torch.zeros_like(model.weight.data)
    places = [item for one in found.computations for item in one.inputs.items()]
    inputs = {name: torch.empty_strided(where.shape, where.strides, dtype=dtype).zero_() for name, (where, dtype) in places}
    tensors = {"weight": parameter, **inputs}
    tensors |= {name: arranged.of(tensors[arranged.tensor]) for name, arranged in found.arranged.items()}
    for piece in expand(found.slices):
        part = source[tuple(slice(*extent) for extent in piece.box)]
        target = tensors[piece.tensor][tuple(slice(*extent) for extent in piece.local)]
        target.copy_(part.reshape(target.shape))
    for one in found.computations:
        parameter.as_strided(one.target.shape, one.target.strides, one.target.offset).copy_(one.compute(inputs))
    return parameter


def check(model: Model, source: Tensor) -> Recording:
    """Compares a refit of the recorded slices with the loader itself, on data."""
    found = record(model, [("w", tuple(source.shape), source.dtype)], model.weight.dtype)
    assert not model.weight.any(), "recording wrote into the parameter"
    assert not found.refused, found.refused
    model.load_weights([("w", source)])
    assert torch.equal(refitted(model, source, found), model.weight.data)
    return found


def numbered(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


LOADERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Load]] = {
    "a fused part": ((8, 6), (4, 6), lambda model, w: model.weight.data[2:6].copy_(w)),
    "transposed and dense": ((6, 4), (4, 6), lambda model, w: model.weight.data.copy_(w.t().contiguous().view(6, 4))),
    "halves of transposed experts": (
        (3, 8, 2),
        (3, 2, 8),
        lambda model, w: [model.weight.data[:, 4 * i : 4 * i + 4].copy_(h) for i, h in enumerate(w.mT.chunk(2, 1))],
    ),
    "one expert of a stack": ((3, 4, 2), (5, 4, 2), lambda model, w: model.weight.data[1].copy_(w[3])),
    "de-interleaved rows": ((8, 5), (8, 5), lambda model, w: model.weight.data.copy_(torch.cat([w[::2], w[1::2]]))),
    "even rows": ((4, 5), (8, 5), lambda model, w: model.weight.data.copy_(w[::2])),
    "a scalar": ((1,), (), lambda model, w: model.weight.data.copy_(w)),
    "stacked": ((2, 3, 4), (3, 8), lambda model, w: model.weight.data.copy_(torch.stack(w.chunk(2, 1)))),
    "a loaded value computed in place": (
        (4,),
        (8,),
        lambda model, w: [model.weight.data.copy_(w[4:]), model.weight.data.copy_(-torch.exp(model.weight.float()))],
    ),
    "one more": ((4,), (4,), lambda model, w: model.weight.data.copy_(w + 1)),
    "scaled and transposed": ((2, 4), (4, 3), lambda model, w: model.weight.data.copy_((w[:, :2] * 0.5).t())),
    "a cast that rounds": ((4, 4), (4, 4), lambda model, w: model.weight.data.copy_((w / 3).to(torch.float16))),
    "a cast that does not": ((4, 4), (4, 4), lambda model, w: model.weight.data.copy_(w.to(torch.float64)[:4])),
    "padding of zeros": ((6, 4), (4, 4), lambda model, w: [model.weight.data[:4].copy_(w), model.weight.data[4:].fill_(0)]),
}
COMPUTED = {"de-interleaved rows", "stacked", "a loaded value computed in place", "one more"}
COMPUTED |= {"scaled and transposed", "a cast that rounds"}


@pytest.mark.parametrize("name", LOADERS)
def test_a_refit_writes_what_the_loader_writes(name: str) -> None:
    shape, source, load = LOADERS[name]
    found = check(Model(shape, load), numbered(*source))
    assert bool(found.unwritten) == (name in {"a fused part", "one expert of a stack"})
    assert bool(found.computations) == (name in COMPUTED), "views need no computation"


@st.composite
def viewed(draw: st.DrawFn, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """A chain of view operations that fits a tensor of `shape`."""
    steps: list[Callable[[Tensor], Tensor]] = []
    example = torch.empty(shape, device="meta")
    for _ in range(draw(st.integers(0, 5))):
        dim = draw(st.integers(0, example.dim() - 1)) if example.dim() else 0
        size = example.shape[dim] if example.dim() else 1
        other = draw(st.integers(0, example.dim() - 1)) if example.dim() else 0
        start = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, size - start))
        split = draw(st.sampled_from([part for part in range(1, size + 1) if size % part == 0]))
        choices: list[Callable[[Tensor], Tensor]] = [lambda x: x.unsqueeze(0), lambda x: x.contiguous(), lambda x: x.clone()]
        if example.dim():
            choices += [
                lambda x, d=dim, s=start, n=length: x.narrow(d, s, n),
                lambda x, d=dim, o=other: x.transpose(d, o),
                lambda x, d=dim, s=size, p=split: x.unflatten(d, (p, s // p)),
                lambda x, d=dim, s=start: x.select(d, s),
                lambda x, d=dim, p=split: x.chunk(p, d)[0],
                lambda x: x.squeeze(),
                lambda x: x.reshape(-1),
            ]
        step = draw(st.sampled_from(choices))
        steps.append(step)
        example = step(example)

    def chain(tensor: Tensor) -> Tensor:
        for step in steps:
            tensor = step(tensor)
        return tensor

    return chain


@settings(max_examples=40)
@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_any_chain_of_views_is_described(data: st.DataObject, sizes: list[int]) -> None:
    """The target is a permuted range of a larger parameter. Chains that mix elements of a box are refused, never wrong."""
    chain = data.draw(viewed(tuple(sizes)))
    source = numbered(*sizes)
    value = chain(source)
    order = data.draw(st.permutations(range(value.dim())))
    before = [data.draw(st.integers(0, 2)) for _ in order]
    shape = tuple(value.shape[dim] + low + 1 for dim, low in zip(order, before, strict=True))

    def load(model: Model, w: Tensor) -> None:
        part = model.weight.data
        for at, (dim, low) in enumerate(zip(order, before, strict=True)):
            part = part.narrow(at, low, value.shape[dim])
        back = [order.index(dim) for dim in range(value.dim())]
        part.permute(back).copy_(chain(w))

    model = Model(shape, load)
    found = record(model, [("w", tuple(sizes), torch.float32)], torch.float32)
    if found.refused:
        assert value.numel() > 1
        return
    model.load_weights([("w", source)])
    assert torch.equal(refitted(model, source, found), model.weight.data)
    assert found.unwritten == ({"weight": model.weight.numel() - value.numel()} if shape else {})


def test_numbered_parameters_of_one_tensor_are_stacked() -> None:
    """Experts 4, 5 and 7 of a rank that holds three: one stack of two, and one alone."""

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w2 = torch.nn.Parameter(torch.zeros(3, 2, 4))

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for name, weight in weights:
                self.w2.data[{"4": 0, "5": 1, "7": 2}[name.split(".")[1]]].copy_(weight)

    found = record(Experts(), [(f"experts.{n}.down", (2, 4), torch.float32) for n in (4, 5, 7)], torch.float32)
    assert [(one.name, one.box, one.local) for one in found.slices] == [
        ("experts.*.down", ((4, 6), (0, 2), (0, 4)), ((0, 2), (0, 2), (0, 4))),
        ("experts.7.down", ((0, 2), (0, 4)), ((2, 3), (0, 2), (0, 4))),
    ]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda model, w: model.weight.data.fill_(w.sum().item()), r"loader of 'w' needs .*local_scalar_dense"),
        (lambda model, w: model.weight.data.copy_(w[w > 0]), r"loader of 'w' needs aten\.(nonzero|index)"),
        (lambda model, w: model.weight.data.mul_(w), r"loader of 'w', 'weight' needs aten\.mul_"),
        (lambda model, w: model.weight.data.copy_(w.add_(1)), r"loader of 'w' needs aten\.add_"),
        (lambda model, w: model.weight.data.copy_(torch.zeros(4).copy_(w)), r"assembles w in a buffer of its own"),
    ],
)
def test_loaders_that_need_data_are_refused_by_name(load: Load, message: str) -> None:
    model = Model((4,), load)
    with pytest.raises(ConfigError, match=message):
        record(model, [("w", (4,), torch.float32)], torch.float32)
    assert not model.weight.any()


def test_incomplete_recordings_name_the_parameters_left_out() -> None:
    model = Model((6, 4), lambda model, w: model.weight.data[:4].copy_(w))
    found = record(model, [("w", (4, 4), torch.float32)], torch.float32)
    with pytest.raises(ConfigError, match=r"fills the engine's Model in part: 'weight' \(8 elements\) of 1 parameters"):
        check_complete("Model", found)
    odd = Model((2, 3), lambda model, w: model.weight.data.copy_(w.t().contiguous().view(-1)[1:7].view(2, 3)))
    found = record(odd, [("w", (4, 2), torch.float32)], torch.float32)
    with pytest.raises(ConfigError, match=r"loader of Model puts 'w' where a refit cannot: a view of"):
        check_complete("Model", found)


class Packing:
    """A quantization method that keeps a packed copy and drops the weight."""

    @staticmethod
    def process_weights_after_loading(layer: Any) -> None:
        if layer.weight.ndim != 2:
            return
        layer.packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda states: states @ layer.packed.T
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Engine(torch.nn.Module):
    """One layer, whose loader puts even rows of the checkpoint's parameter first: a value that it computes (Falcon)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = torch.nn.Linear(3, 8, bias=False)
        self.layer.quant_method = Packing

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            self.layer.weight.data.copy_(torch.cat([weight[::2], weight[1::2]]))


def test_a_computed_weight_is_packed_again_after_a_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(set_current_vllm_config=lambda _: nullcontext())
    fakes = {"vllm.config": config, "vllm.model_executor.layers.attention": SimpleNamespace(MLAAttention=())}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    first, second = torch.rand(2, 8, 3)
    engine = Engine()
    engine.load_weights([("w", first)])
    held = {name: LoadedParameter(tensor, tensor.flatten().clone()) for name, tensor in named_tensors(engine).items()}
    loaded = LoadedModel(held, record(engine, [("w", (8, 3), torch.float32)], torch.float32))
    Packing.process_weights_after_loading(engine.layer)
    model_config = SimpleNamespace(dtype=torch.float32)
    settings = SimpleNamespace(quant_config=None, parallel_config=SimpleNamespace(), model_config=model_config)
    held["layer.weight"].sample[3] = torch.nan
    with pytest.raises(CheckpointError, match=r"weights in 'layer\.weight' have NaN; download"):
        find_destinations(engine, loaded, settings)
    held["layer.weight"].sample[3] = held["layer.weight"].tensor.flatten()[3]
    destinations = find_destinations(engine, loaded, settings)
    for piece in expand(destinations.slices):
        target = destinations.tensors[piece.tensor][tuple(slice(*extent) for extent in piece.local)]
        target.copy_(second[tuple(slice(*extent) for extent in piece.box)].reshape(target.shape))
    for hook in destinations.hooks:
        hook()
    assert torch.equal(engine.layer.cpu_linear(torch.eye(3)).T, torch.cat([second[::2], second[1::2]]))


class Late(torch.nn.Module):
    """A head whose loader makes the bias once the checkpoint has one, as vLLM's models of transformers' modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 8, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            if name == "bias":
                self.head.bias = torch.nn.Parameter(torch.empty(8))
            getattr(self.head, name).data.copy_(weight)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_parameter_that_the_loader_makes_is_recorded_in_place(loaded: bool) -> None:
    model, bias = Late(), None
    if loaded:
        model.load_weights([("weight", torch.ones(8, 3)), ("bias", torch.ones(8))])
        bias = model.head.bias
    found = record(model, [("weight", (8, 3), torch.float32), ("bias", (8,), torch.float32)], torch.float32)
    check_complete("Late", found)
    assert {piece.tensor for piece in found.slices} == {"head.weight", "head.bias"}
    assert not loaded or (model.head.bias is bias and torch.equal(model.head.bias, torch.ones(8)))
