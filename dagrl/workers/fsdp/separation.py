"""Whether sequences of a packed row see each other, and whether they see a prefix that they share.

Before a run the model's code tells, in workers its outputs. Imported only where torch is.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface

from dagrl.attributes import setting
from dagrl.errors import ConfigError
from dagrl.workers.fsdp.attention import TORCH_VARLEN
from dagrl.workers.fsdp.context import given_arguments, mask_makers, replaced
from dagrl.workers.fsdp.dry import build
from dagrl.workers.fsdp.media import takes_types, text_positions
from dagrl.workers.fsdp.model import HiddenStates, reshard
from dagrl.workers.fsdp.output import base_of
from dagrl.workers.train.microbatches import Segments, make_segments

LENGTHS = 9, 7  # tokens of the two sequences that are tried


class _ReachedAttentionError(Exception):
    pass


def unseparated(kind: type[Any], config: Any, attention: str | None, *, images: bool) -> str:
    """Says by what sequences see each other in a model with this attention, as far as its code tells; empty if by nothing.

    The model runs without weights up to its first attention. A mask separates sequences if it is made from their positions;
    kernels without masks do if they are handed positions, or (`torch_varlen`) the sequences' ends. `images`: rows have them.
    """
    net = _built(kind, config, attention)
    if net is None:
        return ""
    base = base_of(net)
    if images and attention == TORCH_VARLEN and takes_types(base):
        net.set_attn_implementation("sdpa")
    implementation = net.config._attn_implementation
    named = f"attn_implementation {implementation}"
    masks: list[bool] = []
    handed: list[set[str]] = []

    def recording(maker: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> None:
            given = given_arguments(maker, args, kwargs)
            masks.append(given.get("attention_mask") is None and given.get("position_ids") is not None)

        return make

    tokens = _positions().to("meta")
    arguments = {"cu_seq_lens_q": tokens} if implementation == TORCH_VARLEN else {}
    with replaced(mask_makers(net), recording), _attention(handed):
        try:
            base(input_ids=tokens, position_ids=text_positions(base, tokens), use_cache=False, **arguments)
        except Exception:  # noqa: S110  # masks are made first, and some layers do not run without weights
            pass
    if "flash" not in implementation and implementation != TORCH_VARLEN:
        return "" if all(masks) else f"masks that are not made from positions ({named})"
    needed = "cu_seq_lens_q" if implementation == TORCH_VARLEN else "position_ids"
    return "" if all(needed in names for names in handed) else f"attention that is not handed {needed} ({named})"


def unshared(kind: type[Any], config: Any, attention: str | None, *, images: bool) -> str:
    """Names what keeps sequences from sharing prefixes in a model with this attention, as far as its code tells; empty if
    nothing does.

    `torch_varlen` is handed prefixes; `sdpa` and `eager` take whole masks, which follow from positions.
    """
    if attention not in (None, "sdpa", "eager", TORCH_VARLEN):
        return f"attn_implementation {attention}, which takes no whole masks"
    net = _built(kind, config, attention) if images else None
    return "images whose tokens see each other" if net is not None and takes_types(base_of(net)) else ""


def _built(kind: type[Any], config: Any, attention: str | None) -> Any:
    """Returns the model without weights; None if it cannot be built, which `dry_model` reports with its reason."""
    try:
        return build(kind, config, attention)
    except Exception:
        return None


def _attention(handed: list[set[str]]) -> AbstractContextManager[None]:
    """Context in which transformers' attention only says what it is handed, and ends the run."""

    def attend(*_: Any, **kwargs: Any) -> None:
        handed.append({name for name, value in kwargs.items() if value is not None})
        raise _ReachedAttentionError

    return setting(AttentionInterface, get_interface=lambda *_: attend)


@torch.no_grad()
def check_separation(root: HiddenStates, device: torch.device) -> None:
    """Raises ConfigError if a sequence of a packed row sees the one before it. A collective."""
    first, count = LENGTHS[0], sum(LENGTHS)
    positions = _positions().to(device)
    tokens = torch.arange(count, device=device)[None] % root.net.config.get_text_config().vocab_size
    others = torch.where(torch.arange(count, device=device) < first, tokens.flip(1), tokens)
    starts = torch.tensor([0, first, count], dtype=torch.int32, device=device)
    segments = Segments(LENGTHS, LENGTHS, starts, starts, None)
    media = None if root.media is None else torch.zeros_like(tokens)
    with nullcontext() if root.context is None else root.context.disabled():
        one, other = (root(row, positions, segments, media=media)[0, first:].float() for row in (tokens, others))
    reshard(root)
    if (one - other).norm() > 0.02 * one.norm():  # experts see another batch, and round differently
        attention = root.net.config._attn_implementation
        raise ConfigError(
            f"sequences of a packed row see each other in {type(root.net).__name__} with attn_implementation {attention}; "
            "set policy.sequence_packing.enabled=false, or another policy.fsdp_cfg.attn_implementation"
        )


@torch.no_grad()
def shares_prefixes(root: HiddenStates, device: torch.device) -> bool:
    """Whether sequences with a shared prefix have the hidden states that they have in whole, on every rank. A collective.

    They may differ by what kernels round, but not as by another prefix.
    """
    config, media = root.net.config, root.media
    if unshared(type(root.net), config, config._attn_implementation, images=False) or (media is not None and media.masks):
        return False
    shared, size = LENGTHS[0], root.net.config.get_text_config().vocab_size
    prefix, *own = (7 * torch.arange(shared + sum(LENGTHS), device=device) % size).split((shared, *LENGTHS))

    def run(heads: tuple[int, ...], *parts: tuple[Tensor, int]) -> Tensor:
        """Returns the hidden states of the two sequences' own tokens, in a row of parts that begin at these positions."""
        tokens, lengths = torch.cat([part for part, _ in parts])[None], [len(part) for part, _ in parts]
        positions = torch.cat([torch.arange(start, start + len(part), device=device) for part, start in parts])[None]
        media = None if root.media is None else torch.zeros_like(tokens)
        hidden = root(tokens, positions, make_segments([lengths], 1, 0, device, heads), media=media)[0].float()
        return torch.cat([one[-length:] for one, length in zip(hidden.split(lengths)[-2:], LENGTHS, strict=True)])

    found = run((-1, 0, 0), (prefix, 0), *((part, shared) for part in own))
    whole, other = (run((), *((torch.cat([one, part]), 0) for part in own)) for one in (prefix, prefix.flip(0)))
    reshard(root)
    alike = ((found - whole).norm() <= torch.maximum(0.01 * whole.norm(), 0.25 * (other - whole).norm())).int()
    if dist.is_initialized():  # all ranks plan their microbatches by this
        dist.all_reduce(alike, dist.ReduceOp.MIN)
    return bool(alike)


def _positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]
