"""Records where a model's own `load_weights` puts each element of a checkpoint, without data.

`load_weights` runs over meta tensors. Views of them are exact: torch itself computes their strides. The recorder sees every
operation below, and keeps copies into parameters instead of executing them:

- a copy of a view becomes `WeightSlice`s of the parameter's tensor, or of a view of it (`dagrl.refit.strided.Arranged`);
- a copy of a computed value becomes a `Computation`: its inputs are slices of tensors of their own, and a refit computes
  the value again after it has written them;
- constants stay as the engine has initialized them.

Operations that need the data (`item`, boolean masks) and parameters changed in place raise a ConfigError with their name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dagrl.errors import ConfigError, RefitPlanError
from dagrl.refit.fp8 import FP8, with_scales
from dagrl.refit.slices import WeightSlice
from dagrl.refit.strided import Arranged, Strided, StridedCopy, copied_slices, stack_experts

if TYPE_CHECKING:
    from torch import Tensor

_ATEN = torch.ops.aten
_COPIES = {_ATEN.clone.default, _ATEN._to_copy.default, _ATEN.contiguous.default}
_CONSTANTS = {_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default}


@dataclass(frozen=True)
class Computation:
    """A value that a loader computes, and the parameter that it writes.

    `inputs` are tensors of its own that a refit writes first, by local name. `compute(inputs)` returns the value of the view
    `target` of the parameter `parameter`.
    """

    parameter: str
    target: Strided
    inputs: Mapping[str, tuple[Strided, torch.dtype]]
    compute: Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Recording:
    """Where a loader puts a checkpoint: `slices` of parameters, of views of them (`arranged`) and of `computations`' inputs.

    `unwritten` has the parameters of which a refit would leave elements unwritten that the loader does not set to a constant
    either, and how many. `quantized` are the checkpoint's parameters that are held in FP8. `refused` has the reason for each
    parameter of the checkpoint that cannot be described.
    """

    slices: list[WeightSlice] = field(default_factory=list)
    arranged: dict[str, Arranged] = field(default_factory=dict)
    computations: list[Computation] = field(default_factory=list)
    unwritten: dict[str, int] = field(default_factory=dict)
    quantized: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)


class Recorded:
    """The tensors that a refit of a recording writes, by the local names in its slices.

    `tensors` has those of the model (`held`), views of them, and the inputs of computations. Call `compute` after a refit.
    """

    def __init__(self, recording: Recording, parameters: Mapping[str, Tensor]) -> None:
        device = next(iter(parameters.values())).device
        self._computations, self._held = recording.computations, parameters
        self._inputs = {
            name: where.empty(dtype, device)
            for computation in recording.computations
            for name, (where, dtype) in computation.inputs.items()
        }
        self.tensors = {**parameters, **self._inputs}
        self.tensors |= {name: view.of(self.tensors[view.tensor]) for name, view in recording.arranged.items()}

    def compute(self) -> None:
        """Writes what the loader computes from the weights that a refit has written."""
        for computation in self._computations:
            target, parameter = computation.target, self._held[computation.parameter]
            written = parameter.as_strided(target.shape, target.strides, target.offset)
            written.copy_(computation.compute(self._inputs))


def named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns all parameters and buffers of a model, by each of their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def check_complete(model: str, recording: Recording) -> None:
    """Raises ConfigError unless a refit can write all of the model."""
    for name, reason in recording.refused.items():
        raise ConfigError(
            f"the engine's loader of {model} puts {name!r} where a refit cannot: {reason}. Use a model that dagrl bench "
            "refit --architectures lists as passed"
        )
    if recording.unwritten:  # the engine has checked that the checkpoint fills the model
        names = [f"{name!r} ({count} elements)" for name, count in sorted(recording.unwritten.items())]
        raise ConfigError(
            f"the checkpoint fills the engine's {model} in part: {', '.join(names[:4])} of {len(names)} parameters would "
            "stay as they are. Use a complete plain checkpoint, or a kernel that does not pad"
        )


Checkpoint = Iterable[tuple[str, tuple[int, ...], torch.dtype]]  # name, shape and dtype of each parameter

Load = Callable[[Iterator[tuple[str, "Tensor"]]], object]


class UnmappedError(ConfigError):
    """The loader does something with the parameters `names` of the checkpoint that a recording cannot follow."""

    def __init__(self, message: str, names: Iterable[str]) -> None:
        super().__init__(message)
        self.names = frozenset(names)


def record(model: torch.nn.Module, checkpoint: Checkpoint, dtype: torch.dtype, load: Load | None = None) -> Recording:
    """Records what `model.load_weights` (or `load`) does with a checkpoint of these names, shapes and dtypes.

    Neither parameters nor buffers change. Slices of tensors in other dtypes than `dtype` have theirs. Raises ConfigError if
    the loader needs data.
    """
    recorder = Recorder(model)
    sources = [(name, recorder.source(name, shape, kind)) for name, shape, kind in checkpoint]
    hook = torch.nn.modules.module.register_module_parameter_registration_hook(recorder.registered)
    try:
        with torch.inference_mode(False), torch.no_grad(), recorder:
            (load or model.load_weights)(iter(sources))  # type: ignore[operator]
    finally:
        hook.remove()
        recorder.restore()
    return recorder.finish(dtype)


@dataclass(frozen=True)
class Memory:
    """What a storage holds: a parameter of the checkpoint, one of the model, a dense copy of a view, or a computed value."""

    kind: str
    name: str = ""
    shape: tuple[int, ...] = ()
    copied: Strided | None = None
    original: View | None = None
    made: _Call | None = None


@dataclass(frozen=True)
class View:
    """A view of recorded memory."""

    base: Memory
    where: Strided
    dtype: torch.dtype

    def sources(self) -> Iterator[View]:
        """Yields the views of checkpoint or model parameters that this one is made of."""
        if self.base.original is not None:
            yield from self.base.original.sources()
        elif self.base.made is not None:
            for view in self.base.made.inputs:
                yield from view.sources()
        else:
            yield self

    def through(self, copy: StridedCopy) -> tuple[StridedCopy, View]:
        """Returns a copy of this view as a copy of what its dense copies were made from, and that view."""
        view = self
        while view.base.original is not None and view.base.copied is not None:
            copy, view = copy.through(view.base.copied, view.base.original.where), view.base.original
        return copy, view

    def pieces(self, place: Strided) -> Iterator[tuple[View, Strided]]:
        """Yields the views that `torch.cat` joined to this one, each with its part of `place`; itself if none were."""
        call = self.base.made
        if call is None or call.func is not _ATEN.cat.default or self.where != Strided.whole(self.base.shape):
            yield self, place
            return
        (slots, *dim), _ = call.template
        axis = (dim[0] if dim else 0) % len(self.base.shape)
        offset = place.offset
        for slot in slots:
            if not isinstance(slot, _Slot):
                raise RefitPlanError("a tensor that is joined to parameters is none itself")
            view = call.inputs[slot.number]
            yield from view.pieces(Strided(offset, view.where.shape, place.strides))
            offset += view.where.shape[axis] * place.strides[axis]


_Place = tuple[str, Strided, bool]
"""A written view of a parameter of the model, and whether the value is computed from that parameter."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows views and copies of meta tensors, and copies into the parameters of `model`."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets = named_tensors(model)
        self._parameters = [name for name, _ in model.named_parameters()]
        self._bases: dict[int, Memory] = {}
        self._alive: list[Any] = []  # storages, so that no other has the address of one of them
        self._writes: dict[_Place, View] = {}
        self._written: set[str] = set()
        self._constants: dict[str, int] = defaultdict(int)
        self._names = {module: name for name, module in model.named_modules()}
        self._replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
        for name, tensor in reversed(self.targets.items()):
            self._register(tensor, Memory("target", name))

    def source(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the meta tensor that stands for a parameter of the checkpoint."""
        return self._register(torch.empty(shape, dtype=dtype, device="meta"), Memory("source", name, tuple(shape)))

    def registered(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        """Follows writes to a parameter that the loader gives a module of the model, instead of the one that it had."""
        if module not in self._names or parameter is None:
            return
        full, former = f"{self._names[module]}.{name}".lstrip("."), module._parameters.get(name)
        self._register(parameter, Memory("target", full))
        if former is not None:
            self._replaced.append((module, name, former))
        elif full not in self.targets:
            self.targets[full] = parameter.detach()
            self._parameters.append(full)

    def restore(self) -> None:
        """Gives modules back the parameters that the loader has replaced."""
        for module, name, former in reversed(self._replaced):
            module._parameters[name] = former

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        tracked = [tensor for tensor in tensors if tensor.untyped_storage()._cdata in self._bases]
        if not tracked or (not func._schema.is_mutable and not any(map(self._is_changed, tracked))):
            return func(*args, **kwargs)
        if func is _ATEN.copy_.default:
            return self._copy(args[0], args[1])
        if func in _CONSTANTS and self._base(args[0]).kind == "target":
            self._constants[self._base(args[0]).name] += args[0].numel()
            return args[0]
        if func in _CONSTANTS and args[0].numel() * args[0].element_size() == args[0].untyped_storage().nbytes():
            del self._bases[args[0].untyped_storage()._cdata]  # the loader puts a constant in place of the parameter
            return args[0]
        if func._schema.is_mutable:
            raise self._refusal(func, tracked)
        if func in _COPIES:
            return self._dense_copy(args[0], kwargs)
        if func.is_view or func is _ATEN._unsafe_view.default:
            return func(*args, **kwargs)
        decomposed = func.decompose(*args, **kwargs) if func._can_decompose() else NotImplemented
        return self._computed(func, args, kwargs, tracked) if decomposed is NotImplemented else decomposed

    def _copy(self, target: Tensor, value: Tensor) -> Tensor:
        if not target.numel():
            return target
        into, source = self.view(target), self.view(value)
        if into is None or into.base.kind != "target":
            sources = sorted({view.base.name for view in (source.sources() if source else ())})
            raise UnmappedError(
                f"the engine's loader assembles {', '.join(sources) or into} in a buffer of its own, which a refit cannot "
                "follow. Use a model that dagrl bench refit --architectures lists as passed",
                sources,
            )
        self._written.add(into.base.name)
        if source is None:
            self._constants[into.base.name] += target.numel()
        elif value.numel() != target.numel():
            raise self._refusal("a copy that repeats its input", [value])
        else:
            source = self.view(value.reshape(target.shape)) or source
            reads = any(one.base.kind == "target" and one.base.name == into.base.name for one in source.sources())
            self._writes[into.base.name, into.where, reads] = source
        return target

    def _dense_copy(self, tensor: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        view, dtype = self.view(tensor), kwargs.get("dtype")
        assert view is not None
        exact = dtype is None or dtype == tensor.dtype or dtype.itemsize > tensor.dtype.itemsize
        if not exact or (dtype is not None and dtype.is_floating_point != tensor.dtype.is_floating_point):
            copy: Tensor = self._computed(_ATEN._to_copy.default, (tensor,), {"dtype": dtype}, [tensor])
            return copy
        form = kwargs.get("memory_format") or torch.preserve_format
        copy = torch.empty_like(tensor, dtype=dtype, device="meta", memory_format=form)
        return self._register(copy, Memory("copied", copied=Strided.of(copy), original=view))

    def _computed(self, func: Any, args: Any, kwargs: Any, tracked: list[Tensor]) -> Any:
        inputs = tuple(view for leaf in tracked for view in (self.view(leaf),) if view is not None)
        numbered = {id(leaf): number for number, leaf in enumerate(tracked)}

        def on_meta(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return torch.device("meta") if isinstance(leaf, torch.device) else leaf
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

        try:
            result = func(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
        except (RuntimeError, NotImplementedError) as error:
            raise self._refusal(func, tracked) from error
        leaves = tree_leaves(result)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise self._refusal(func, tracked)
        template = tree_map(lambda leaf: _Slot(numbered[id(leaf)]) if id(leaf) in numbered else leaf, (args, kwargs))
        for number, leaf in enumerate(leaves):
            base = Memory("made", str(func), tuple(leaf.shape), made=_Call(func, template, number, inputs))
            self._register(leaf, base)
        return result

    def _refusal(self, operation: object, tracked: Iterable[Tensor]) -> ConfigError:
        views = [view for tensor in tracked for view in (self.view(tensor),) if view is not None]
        names = sorted({source.base.name for view in views for source in view.sources()})
        return UnmappedError(
            f"the engine's loader of {', '.join(map(repr, names[:4]))} needs {operation}, which a refit cannot describe. "
            "Use a model that dagrl bench refit --architectures lists as passed",
            names,
        )

    def _register(self, tensor: Tensor, base: Memory) -> Tensor:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._bases[storage._cdata] = base
        return tensor

    def _is_changed(self, tensor: Tensor) -> bool:
        """Returns whether a refit changes it. Expert maps, for example, are only read by the loader."""
        base = self._base(tensor)
        return base.kind != "target" or base.name in self._written

    def _base(self, tensor: Tensor) -> Memory:
        return self._bases.get(tensor.untyped_storage()._cdata, Memory("other"))

    def view(self, tensor: Tensor) -> View | None:
        """Returns what `tensor` is a view of; None if that is not recorded."""
        base = self._bases.get(tensor.untyped_storage()._cdata)
        return None if base is None else View(base, Strided.of(tensor), tensor.dtype)

    def finish(self, dtype: torch.dtype) -> Recording:
        """Returns what was recorded."""
        return _Finish(self.targets, self._writes, dtype).recording(self._parameters, self._constants)


@dataclass(frozen=True)
class _Slot:
    number: int


@dataclass(frozen=True)
class _Call:
    """A computed value: `func` of `template`, with the inputs in its slots; output `number` of it."""

    func: Any
    template: Any
    number: int
    inputs: tuple[View, ...]

    def __call__(self, tensors: Mapping[View, Tensor]) -> Tensor:
        values = [evaluate(view, tensors) for view in self.inputs]
        args, kwargs = tree_map(lambda leaf: values[leaf.number] if isinstance(leaf, _Slot) else leaf, self.template)
        output: Tensor = tree_leaves(self.func(*args, **kwargs))[self.number]
        return output


def evaluate(view: View, tensors: Mapping[View, Tensor]) -> Tensor:
    """Returns the value of a view. `tensors` has those of its sources, contiguous."""
    if view.base.original is not None:
        dense = evaluate(view.base.original, tensors).to(view.dtype)
        memory = view.base.copied
        assert memory is not None
        copy = torch.empty_strided(memory.shape, memory.strides, dtype=dense.dtype, device=dense.device).copy_(dense)
        return copy.as_strided(view.where.shape, view.where.strides, view.where.offset)
    if view.base.made is not None:
        return view.base.made(tensors).as_strided(view.where.shape, view.where.strides, view.where.offset)
    return tensors[view]


class _Finish:
    """Turns writes into slices and computations."""

    def __init__(self, targets: Mapping[str, Tensor], writes: Mapping[_Place, View], dtype: torch.dtype) -> None:
        self._targets, self._writes, self._dtype = targets, writes, dtype
        self._found = Recording()
        self._slices: list[WeightSlice] = []
        self._written: dict[str, int] = defaultdict(int)

    def recording(self, parameters: Iterable[str], constants: Mapping[str, int]) -> Recording:
        recomputed = {name for name, _, reads in self._writes if reads}
        for (name, where, reads), view in self._writes.items():
            if any(source.base.kind == "target" for source in view.sources()) or view.base.made is not None:
                self._compute(name, where, view)
                self._written[name] += 0 if reads else math.prod(where.shape)
            else:
                parameter = Strided.of(self._targets[name])
                local = f"{name}.loaded" if name in recomputed else name
                self._take(view, local, parameter, where, self._targets[name].dtype)
                self._written[name] += math.prod(where.shape)
        for name in parameters:
            tensor = self._targets[name]
            missing = tensor.numel() - self._written[name] - constants.get(name, 0)
            if missing > 0 and tensor.dim():  # scalars belong to the KV cache
                self._found.unwritten[name] = missing
        fp8 = frozenset(weight.name for weight in self._slices if weight.dtype == FP8)
        return replace(self._found, slices=stack_experts(with_scales(self._slices)), quantized=fp8)

    def _take(self, view: View, tensor: str, memory: Strided, where: Strided, dtype: torch.dtype) -> None:
        """Adds the slices of a copied view."""
        try:
            copy, view = view.through(StridedCopy.between(view.where, where))
            kind = "" if dtype == self._dtype else str(dtype).removeprefix("torch.")
            slices, arranged = copied_slices(view.base.name, view.base.shape, copy, tensor, memory, kind)
        except RefitPlanError as error:
            self._found.refused[next(view.sources()).base.name] = str(error)
            return
        self._slices += slices
        if arranged is not None:
            self._found.arranged[arranged.name] = arranged

    def _compute(self, name: str, where: Strided, view: View) -> None:
        """Adds a computation, and the slices of its inputs."""
        inputs: dict[str, tuple[Strided, torch.dtype]] = {}
        locals_of: dict[View, str] = {}
        own = sum(computation.parameter == name for computation in self._found.computations)
        for number, source in enumerate(dict.fromkeys(view.sources())):
            if source.base.kind == "target":
                if source.base.name != name:
                    self._found.refused[source.base.name] = f"the engine's loader computes {name!r} from it after loading"
                    return
                memory = Strided.of(self._targets[name])
                local, memory = f"{name}.loaded", replace(memory, offset=0)
            else:
                local, memory = f"{name}.input{own}.{number}", Strided.whole(source.where.shape)
                self._take(source, local, memory, memory, source.dtype)
            inputs[local] = (memory, source.dtype)
            locals_of[source] = local

        def compute(tensors: Mapping[str, Tensor]) -> Tensor:
            def of(source: View, local: str) -> Tensor:
                if source.base.kind != "target":
                    return tensors[local]
                at = source.where
                return tensors[local].as_strided(at.shape, at.strides, at.offset - Strided.of(self._targets[name]).offset)

            return evaluate(view, {source: of(source, local) for source, local in locals_of.items()})

        self._found.computations.append(Computation(name, where, inputs, compute))
