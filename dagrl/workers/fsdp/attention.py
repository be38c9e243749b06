"""`torch_varlen`: torch's own FlashAttention 2 for variable lengths, as an attention implementation of transformers.

It takes packed rows as they are, sliding windows included, where transformers' `sdpa` needs a mask over all pairs of tokens.
Transformers makes no mask for an implementation that has registered no function for it. For those that take masks
`shared_masks` has those of rows that share prefixes. Imported only where torch is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, masking_utils

from dagrl.errors import ConfigError
from dagrl.workers.fsdp.architecture import layer_configs
from dagrl.workers.fsdp.context import ROW_POSITIONS
from dagrl.workers.train.cudnn_attention import cudnn_attention, faster
from dagrl.workers.train.microbatches import Segments, upload, with_prefix_keys
from dagrl.workers.train.prefix_attention import Sizes, prefix_attention

TORCH_VARLEN = "torch_varlen"
LARGEST_HEAD = 256


@contextmanager
def shared_masks(implementation: str, segments: Segments, positions: Tensor) -> Iterator[None]:
    """Context in which transformers makes the masks of a packed row with these `positions` [1, s].

    Its functions say which key a query sees, by their indices in a row. Here they are asked for positions in the sequence,
    and a query sees none but the keys of its own sequence and of its prefix.
    """
    plain = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    find_sequences: Callable[..., Any] = masking_utils.find_packed_sequence_indices
    numbers = np.arange(len(segments.heads))
    columns = [np.repeat(column, segments.query_lengths) for column in (numbers, np.array(segments.heads))]
    sequences, prefixes = upload(columns, positions.device)
    places = positions.flatten()

    def make(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Any:
        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            number = sequences[key]
            inside: Tensor = mask_function(row, head, places[query], places[key])
            return inside & ((number == sequences[query]) | (number == prefixes[query]))

        if "allow_is_bidirectional_skip" in kwargs:  # of another part of the model, such as a vision tower
            return plain(*args, mask_function=mask_function, **kwargs)
        return plain(*args, mask_function=seen, **{**kwargs, "allow_is_causal_skip": False})

    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation] = make
    masking_utils.find_packed_sequence_indices = lambda *_: None
    try:
        yield
    finally:
        del masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation]
        masking_utils.find_packed_sequence_indices = find_sequences


class SharedPrefixes(NamedTuple):
    """How a packed row's sequences see their prefixes.

    `seen`: sizes of `Segments.prefixes`. `order`, for windows: that of keys, in which those of a sequence follow its
    prefix's; then their offsets and largest number.
    """

    seen: Sizes
    order: Tensor | None = None
    key_starts: Tensor | None = None
    longest_key: int = 0

    @staticmethod
    def of(segments: Segments, *, windows: bool) -> SharedPrefixes | None:
        """Returns those of these segments; None if no sequences share a prefix."""
        if segments.prefixes is None:
            return None
        seen = SharedPrefixes(segments.prefixes.rounded_sizes)
        whole = with_prefix_keys(segments) if windows else None
        return seen if whole is None else SharedPrefixes(seen.seen, whole.key_order, whole.key_starts, whole.rounded_key)


def default_attention(kind: type[Any], config: Any, device: torch.device, precision: str) -> str | None:
    """Returns `torch_varlen` for a model that it can compute, else None: transformers' choice."""
    text, size = config.get_text_config(), max(map(_head_size, layer_configs(config)))
    plain = getattr(kind, "_supports_flash_attn", False) and not getattr(kind, "_compatible_flash_implementations", None)
    kinds = getattr(text, "layer_types", None) or ()
    special = getattr(text, "attn_logit_softcapping", None) or "chunked_attention" in kinds
    fits = device.type == "cuda" and precision != "float32" and size <= LARGEST_HEAD
    return TORCH_VARLEN if plain and not special and fits and torch.backends.cuda.is_flash_attention_available() else None


def _head_size(layer: Any) -> int:
    heads = getattr(layer, "num_attention_heads", None)
    return getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else LARGEST_HEAD + 1)


def attention_arguments(config: Any, segments: Segments | None, row_positions: Tensor | None = None) -> dict[str, Any]:
    """Returns what models hand through to attention: to `torch_varlen`, under transformers' names, the sequences of packed
    rows; with context parallelism, to other kernels that read positions, those of whole rows."""
    implementation = config._attn_implementation
    if row_positions is not None and "flash" in implementation:
        return {ROW_POSITIONS: row_positions}
    if segments is None or implementation != TORCH_VARLEN:
        return {}
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    shared = SharedPrefixes.of(segments, windows=bool(getattr(config.get_text_config(), "sliding_window", None)))
    return dict(zip(names, segments.rounded_sizes, strict=True)) | ({} if shared is None else {"shared_prefixes": shared})


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    shared_prefixes: SharedPrefixes | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`query` [b, heads, s, d], `key` and `value` [b, kv_heads, s, d] -> [b, s, heads, d], causal unless `is_causal` or the
    module says otherwise.

    A vision tower is not causal. It calls once for each image, and is handed the sequences of the text next to it, which
    are not its own.
    """
    if softcap is not None or s_aux is not None or attention_mask is not None:
        raise ConfigError(
            f"policy.fsdp_cfg.attn_implementation is {TORCH_VARLEN}, which has no capped logits, attention sinks or "
            f"masks as {type(module).__name__} needs them; leave it out, so that one is chosen for the model"
        )
    rows, heads, tokens, size = query.shape
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal or (cu_seq_lens_q is None and sliding_window is None):  # each row is a sequence
        out = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    if cu_seq_lens_q is None:
        cu_seq_lens_q = cu_seq_lens_k = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=query.device)
        max_length_q = max_length_k = tokens
    assert cu_seq_lens_k is not None and max_length_q is not None and max_length_k is not None
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    width = v.shape[-1]
    if width != size:  # MLA
        v = pad(v, (0, size - width))
    scale = size**-0.5 if scaling is None else scaling
    if shared_prefixes is not None and sliding_window is None:
        sizes = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        out = prefix_attention(q, k, v, sizes, shared_prefixes.seen, scale)
        return out.view(rows, tokens, heads, size)[..., :width], None
    if shared_prefixes is not None:  # a prefix has gradients from all its sequences, summed in float32
        assert shared_prefixes.order is not None and shared_prefixes.key_starts is not None
        k, v = (states.float().index_select(0, shared_prefixes.order).to(states.dtype) for states in (k, v))
        cu_seq_lens_k, max_length_k = shared_prefixes.key_starts, shared_prefixes.longest_key
    elif sliding_window is None and faster(q, max_length_k):
        out = cudnn_attention(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, scale)
        return out.view(rows, tokens, heads, size)[..., :width], None
    window = None if sliding_window is None else sliding_window - 1
    out = torch.ops.aten._flash_attention_forward(
        *(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k),
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scaling,
        window_size_left=window,
        window_size_right=None if window is None else 0,
    )[0]
    return out.view(rows, tokens, heads, size)[..., :width], None


AttentionInterface.register(TORCH_VARLEN, attend)
