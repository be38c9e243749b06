"""Attention of packed sequences by cuDNN, through its Python front end, which vLLM installs on GPUs.

torch's own operator for it, `_cudnn_attention_forward` with `cum_seq_q`, builds a plan in every call and gives wrong
gradients: on an H200 with torch 2.11 a call took 57 ms (https://github.com/pytorch/pytorch/pull/191576). Plans are kept
here, and made for rounded sizes, so that batches of similar sizes share them, and a CUDA graph finds those of the pass
before. Imported only where torch is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

OLDEST_CUDNN = 90600
"""The first version with 64-bit offsets, and memory for the tokens in place of the longest segment times their number."""

LARGEST_HEAD = 128
FEWEST_SEGMENTS = 8
LEAST_WORK = 1 << 36
"""Products of a number of a query and one of a key from which on it is faster than FlashAttention 2 on an H200."""

QUERY, KEY, VALUE, OUT, STATS, GRAD, GRAD_QUERY, GRAD_KEY, GRAD_VALUE = range(1, 10)
OFFSETS, KEY_OFFSETS, STATS_OFFSETS, LENGTHS, KEY_LENGTHS = range(10, 15)
"""Ids of the tensors of a plan."""


@dataclass(frozen=True)
class _Sizes:
    """What a plan depends on. Numbers of segments and tokens are rounded up."""

    segments: int
    longest: int
    longest_key: int
    tokens: int
    key_tokens: int
    heads: int
    kv_heads: int
    head: int
    dtype: torch.dtype
    scale: float
    from_end: bool


def _rounded(tokens: int) -> int:
    """Rounds up by at most an eighth."""
    step = max(64, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def available(device: torch.device) -> bool:
    """Whether cuDNN can be used on this GPU, of the generation for which it was measured."""
    return not torch.are_deterministic_algorithms_enabled() and _usable(device)


@cache
def _usable(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or find_spec("cudnn") is None:
        return False
    try:
        import cudnn

        if cudnn.backend_version() < OLDEST_CUDNN:
            return False
        for backward in (False, True):
            _plan(_Sizes(8, 512, 512, 1024, 1024, 8, 8, 128, torch.bfloat16, 0.1, False), backward, device)
    except Exception as error:  # libraries that do not fit each other, or this torch, fail in many ways
        logger.warning("FlashAttention 2 computes packed sequences, as cuDNN's front end does not work: %s", error)
        return False
    return True


def faster(query: Tensor, longest_key: int) -> bool:
    """Whether cuDNN computes the attention of `query` [tokens, heads, d], and is the faster way."""
    tokens, heads, head = query.shape
    fits = head <= LARGEST_HEAD and head % 8 == 0 and query.dtype in (torch.bfloat16, torch.float16)
    return fits and tokens * heads * head * longest_key >= LEAST_WORK and bool(available(query.device))


def cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    scale: float,
    from_end: bool = False,
) -> Tensor:
    """Computes causal attention within segments.

    `query` [queries, heads, d], `key` and `value` [keys, kv_heads, d] -> like `query`. `starts` and `key_starts` [n + 1]
    int32 cover all tokens. `longest` and `longest_key` may be rounded up; a plan is made for each. `from_end`: the last
    query of a segment sees its last key, otherwise the first query the first key.
    """
    sizes = longest, longest_key, scale, from_end
    out: Tensor = FORWARD(query.contiguous(), key.contiguous(), value.contiguous(), starts, key_starts, *sizes)[0]
    return out


SIZES = "Tensor starts, Tensor key_starts, SymInt longest, SymInt longest_key, float scale, bool from_end"
torch.library.define("dagrl::cudnn_attention", f"(Tensor query, Tensor key, Tensor value, {SIZES}) -> (Tensor, Tensor)")
torch.library.define(
    "dagrl::cudnn_attention_backward",
    f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor stats, {SIZES}) -> (Tensor, Tensor, Tensor)",
)
FORWARD = torch.ops.dagrl.cudnn_attention.default
"""The operator, for what chooses by operators. It returns the output, and the log-sum-exp [queries, heads]."""


@torch.library.register_fake("dagrl::cudnn_attention")  # type: ignore[untyped-decorator]
def _outputs(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.impl("dagrl::cudnn_attention", ("cuda", "cpu"))
def _forward(query: Tensor, key: Tensor, value: Tensor, *sizes: Any) -> tuple[Tensor, Tensor]:
    out, stats = _outputs(query)
    _execute(False, {QUERY: query, KEY: key, VALUE: value, OUT: out, STATS: stats}, *sizes)
    return out, stats


@torch.library.register_fake("dagrl::cudnn_attention_backward")  # type: ignore[untyped-decorator]
def _parts(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@torch.library.impl("dagrl::cudnn_attention_backward", ("cuda", "cpu"))
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, stats: Tensor, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    parts: tuple[Tensor, Tensor, Tensor] = _parts(grad, query, key, value)
    tensors = {QUERY: query, KEY: key, VALUE: value, OUT: out, STATS: stats, GRAD: grad.contiguous()}
    _execute(True, tensors | dict(zip((GRAD_QUERY, GRAD_KEY, GRAD_VALUE), parts, strict=True)), *sizes)
    return parts


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, key_starts, *ctx.sizes = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output, starts, key_starts)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *torch.ops.dagrl.cudnn_attention_backward(grad, *ctx.saved_tensors, *ctx.sizes), *[None] * 6


torch.library.register_autograd("dagrl::cudnn_attention", _gradients, setup_context=_save)


def _execute(
    backward: bool,
    tensors: dict[int, Tensor],
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    scale: float,
    from_end: bool,
) -> None:
    import cudnn

    (tokens, heads, head), (keys, kv_heads, _) = tensors[QUERY].shape, tensors[KEY].shape
    segments, device, same = len(starts) - 1, starts.device, starts is key_starts
    count = max(FEWEST_SEGMENTS, 1 << (segments - 1).bit_length())
    if count > segments:
        starts = starts.index_select(0, _places(segments, count, device))
        key_starts = starts if same else key_starts.index_select(0, _places(segments, count, device))
    factors = _factors((heads * head, heads, kv_heads * head), device)
    offsets = torch.empty((3, count + 2), dtype=torch.int64, device=device)  # rows of whole 16 bytes
    torch.mul(factors, starts, out=offsets[:, :-1])
    tensors[OFFSETS], tensors[STATS_OFFSETS], tensors[KEY_OFFSETS] = offsets.unbind()
    tensors[LENGTHS] = tensors[KEY_LENGTHS] = starts.diff()
    if not same:
        tensors[KEY_OFFSETS], tensors[KEY_LENGTHS] = key_starts * factors[2], key_starts.diff()
    shape = heads, kv_heads, head, tensors[QUERY].dtype, scale, from_end
    sizes = _Sizes(count, longest, longest_key, _rounded(tokens), _rounded(keys), *shape)
    plan, workspace = _plan(sizes, backward, device)
    cudnn.set_stream(handle=_handle(device), stream=torch.cuda.current_stream(device).cuda_stream)
    memory = torch.empty(max(1, workspace), dtype=torch.uint8, device=device)
    plan.execute(tensors, memory, handle=_handle(device))


@cache
def _places(segments: int, count: int, device: torch.device) -> Tensor:
    """Returns the indices of offsets with empty segments at the end. A CUDA graph's segments need none."""
    return torch.arange(count + 1, device=device).clamp_(max=segments)


@cache
def _factors(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)[:, None]


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    return cudnn.create_handle()


@cache
def _plan(sizes: _Sizes, backward: bool, device: torch.device) -> tuple[Any, int]:
    """Returns a plan, and the bytes that it needs while it runs."""
    import cudnn

    half = cudnn.data_type.BFLOAT16 if sizes.dtype is torch.bfloat16 else cudnn.data_type.HALF
    single, count = cudnn.data_type.FLOAT, sizes.segments
    types = {"io_data_type": half, "intermediate_data_type": single, "compute_data_type": single}
    graph = cudnn.pygraph(**types, handle=_handle(device))

    def numbers(uid: int, kind: Any, size: int) -> Any:
        return graph.tensor(dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, uid=uid)

    offsets = {uid: numbers(uid, cudnn.data_type.INT64, count + 1) for uid in (OFFSETS, KEY_OFFSETS, STATS_OFFSETS)}
    lengths = [numbers(uid, cudnn.data_type.INT32, count) for uid in (LENGTHS, KEY_LENGTHS)]

    def shaped(uid: int, tensor: Any = None) -> Any:
        """Declares an input, or the output `tensor`: [segments, heads, tokens, d], in memory [tokens, heads, d]."""
        heads, tokens, head, at = sizes.heads, sizes.longest, sizes.head, OFFSETS
        if uid in (KEY, VALUE, GRAD_KEY, GRAD_VALUE):
            heads, tokens, at = sizes.kv_heads, sizes.longest_key, KEY_OFFSETS
        elif uid == STATS:
            head, at = 1, STATS_OFFSETS
        dim, stride = [count, heads, tokens, head], [tokens * heads * head, head, heads * head, 1]
        kind = single if uid == STATS else half
        if tensor is None:
            tensor = graph.tensor(dim=dim, stride=stride, data_type=kind, uid=uid)
        else:
            tensor.set_output(True).set_uid(uid).set_data_type(kind).set_dim(dim).set_stride(stride)
        tensor.set_ragged_offset(offsets[at])
        return tensor

    alignment = cudnn.diagonal_alignment.BOTTOM_RIGHT if sizes.from_end else cudnn.diagonal_alignment.TOP_LEFT
    masks = {"use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
    masks |= {"diagonal_alignment": alignment, "diagonal_band_right_bound": 0}
    inputs = {"q": shaped(QUERY), "k": shaped(KEY), "v": shaped(VALUE), "attn_scale": sizes.scale, **masks}
    if backward:
        inputs |= {"o": shaped(OUT), "dO": shaped(GRAD), "stats": shaped(STATS)}
        inputs |= {"max_total_seq_len_q": sizes.tokens, "max_total_seq_len_kv": sizes.key_tokens}
        outputs = zip((GRAD_QUERY, GRAD_KEY, GRAD_VALUE), graph.sdpa_backward(**inputs), strict=True)
    else:
        outputs = zip((OUT, STATS), graph.sdpa(**inputs, generate_stats=True), strict=True)
    for uid, tensor in outputs:
        shaped(uid, tensor)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, graph.get_workspace_size()
