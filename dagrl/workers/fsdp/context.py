"""Context parallelism of a transformers model: a rank has a run of each row, and in attention whole rows of some heads.

Around whatever computes attention, one all-to-all sends a rank the queries, keys and values of its heads for all tokens, and
another one returns the outputs for its tokens (Ulysses; Jacobs et al. 2023, arXiv:2309.14509). Masks are made for whole
rows, so packed sequences, sliding windows and chunks stay as the model has them. All other layers work token by token.
`check_context` compares with whole rows before training. Imported only where torch is.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils

from dagrl.attributes import setting
from dagrl.errors import ConfigError
from dagrl.workers.fsdp.architecture import layer_configs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTRIBUTE = "_dagrl_context"  # attribute of each module of a model that is split


class Context:
    """The ranks of `group`, which each have a run of every row, in the order of the ranks."""

    def __init__(self, net: PreTrainedModel, group: dist.ProcessGroup) -> None:
        self._net = net
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.enabled = True
        self._makers = mask_makers(net)
        for part in net.modules():
            object.__setattr__(part, _ATTRIBUTE, self)
        _exchange_in_attention()

    def check(self, tensor_parallel: int) -> None:
        """Raises ConfigError for a model that cannot be split, as far as can be known without running it."""
        if not any(isinstance(one, AttentionInterface) for home in _homes(self._net) for one in vars(home).values()):
            raise ConfigError(
                f"policy.fsdp_cfg.context_parallel_size is {self.size}, but {type(self._net).__name__} computes attention "
                "itself, not by an implementation of transformers; set it to 1"
            )
        if any("dynamic" in str(getattr(part, "rope_type", "")) for part in self._net.modules()):
            raise ConfigError(
                f"policy.fsdp_cfg.context_parallel_size is {self.size}, but rotary frequencies of {type(self._net).__name__}"
                " depend on the length of a row (rope_type dynamic); set it to 1"
            )
        for layer in layer_configs(self._net.config):
            heads = getattr(layer, "num_attention_heads", None)
            pairs = getattr(layer, "num_key_value_heads", None) or heads
            if isinstance(heads, int) and isinstance(pairs, int):
                self.repeats(heads // tensor_parallel, pairs // tensor_parallel)

    def repeats(self, heads: int, pairs: int) -> int:
        """Returns how often each of the key/value heads is repeated. Raises ConfigError if ranks cannot share the heads."""
        repeats = self.size // math.gcd(pairs, self.size)
        if heads % (pairs * repeats):
            raise ConfigError(
                f"policy.fsdp_cfg.context_parallel_size is {self.size}, over which {heads} attention heads with {pairs} "
                "key/value heads (of a tensor-parallel rank) cannot be split; choose a size that divides the heads and "
                "divides the key/value heads or is a multiple of them"
            )
        return repeats

    def disabled(self) -> AbstractContextManager[None]:
        """Runs the block with whole rows on each rank."""
        return setting(self, enabled=False)

    @contextmanager
    def whole_rows(self, positions: Tensor) -> Iterator[None]:
        """Context in which the model runs on parts of rows with these positions [b, width], with masks of whole ones."""

        def of_rows(maker: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(maker)
            def make(*args: Any, **kwargs: Any) -> Any:
                given = given_arguments(maker, args, kwargs)
                states = given["inputs_embeds"]  # of which a mask has the sizes
                given["inputs_embeds"] = states[:, :1].expand(-1, positions.shape[1], -1)
                if given.get("position_ids") is not None:
                    given["position_ids"] = positions
                return maker(**given)

            return make

        with replaced(self._makers, of_rows):
            yield

    def attend(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """`query` [b, heads, run, d], `key` and `value` [b, kv_heads, run, d] -> [b, run, heads, d].

        `function` gets whole rows. Key/value heads that are fewer than the ranks are repeated.
        """
        heads, pairs = query.shape[1], key.shape[1]
        repeats = self.repeats(heads, pairs)
        own = slice(self.rank * heads // self.size, (self.rank + 1) * heads // self.size)
        if repeats > 1:
            key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
        states = [self._exchange(one) for one in (query, key, value)]
        rows = kwargs.pop(ROW_POSITIONS, None)
        if rows is not None and "position_ids" in kwargs:
            kwargs["position_ids"] = rows
        kwargs = {name: _of_heads(one, heads, own) for name, one in kwargs.items()}
        out = function(_HeadsOf(module, heads, own, repeats), *states, *args, **kwargs)[0]
        return self._exchange(out), None

    def _exchange(self, states: Tensor) -> Tensor:
        """[b, heads, run, d] -> [b, heads / ranks, width, d], or [b, width, heads / ranks, d] -> [b, run, heads, d]"""
        rows, split, joined, size = states.shape
        parts = states.reshape(rows, self.size, split // self.size, joined, size).movedim(1, 0)
        received: Tensor = _Exchange.apply(parts.contiguous(), self.group)  # type: ignore[no-untyped-call]
        return received.movedim(0, 2).flatten(2, 3)


MaskMaker = tuple[ModuleType, str, Callable[..., Any]]
"""One of transformers' functions that make masks, and where a model's code finds it: a module, and its name there."""


def mask_makers(net: nn.Module) -> list[MaskMaker]:
    """Returns the functions by which a model makes masks of attention."""
    return [
        (home, name, maker)
        for home in _homes(net)
        for name, maker in vars(home).items()
        if name.startswith("create_") and getattr(maker, "__module__", None) == masking_utils.__name__
    ]


@contextmanager
def replaced(makers: list[MaskMaker], other: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Context in which the model calls `other(maker)` in place of each of `makers`."""
    with ExitStack() as stack:
        for home, name, maker in makers:
            stack.enter_context(setting(home, **{name: other(maker)}))
        yield


def given_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by their names."""
    return inspect.signature(function).bind(*args, **kwargs).arguments


def _homes(net: nn.Module) -> list[ModuleType]:
    """Returns the modules with the code of a model."""
    classes = {kind for part in net.modules() for kind in type(part).__mro__}
    return [sys.modules[name] for name in sorted({kind.__module__ for kind in classes} - {AttentionInterface.__module__})]


ROW_POSITIONS = "row_positions"  # argument of a model, which hands it through to attention that reads positions


class _Exchange(torch.autograd.Function):
    """All-to-all along dimension 0, which is its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grads[0].contiguous(), group=ctx.group)
        return received, None


class _HeadsOf:
    """An attention module with some of its heads: with its parameters of these, such as attention sinks."""

    def __init__(self, module: nn.Module, heads: int, own: slice, repeats: int) -> None:
        self._module, self._heads, self._own, self._repeats = module, heads, own, repeats

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name == "num_key_value_groups":
            return value // self._repeats
        return _of_heads(value, self._heads, self._own)


def _of_heads(value: Any, heads: int, own: slice) -> Any:
    """Returns the part of one number per head; anything else as it is, such as as many offsets of sequences."""
    return value[own] if isinstance(value, Tensor) and value.is_floating_point() and value.shape == (heads,) else value


def _exchange_in_attention() -> None:
    """Makes transformers' attention exchange heads, in modules that are part of a `Context`."""
    plain = AttentionInterface.get_interface
    if getattr(plain, _ATTRIBUTE, False):
        return

    @wraps(plain)
    def get_interface(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_attend, plain(self, implementation, default))

    setattr(get_interface, _ATTRIBUTE, True)
    AttentionInterface.get_interface = get_interface


def _attend(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    context: Context | None = getattr(module, _ATTRIBUTE, None)
    if context is None or not context.enabled:
        return function(module, *args, **kwargs)
    return context.attend(function, module, *args, **kwargs)
