"""CUDA graphs of a model's forward and backward pass over a microbatch, recorded once per shape and replayed.

With small microbatches or many workers per model, launching kernels dominates a step. A replay is one launch. A graph covers
the pass from the tokens to the last hidden states, and the backward pass including the addition of gradients to Megatron's
buffers. The loss runs outside. The first microbatch of a shape runs without a graph and the second is recorded, so no kernel
is compiled or selected while recording.

A graph reads and writes fixed addresses. The addresses of all weights and gradient buffers are part of its key, so a
model whose memory moved is recorded again. See PyTorch's notes on CUDA graphs
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). Imported only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor

from dagrl.errors import RunError
from dagrl.workers.megatron.attention import LayerInputs
from dagrl.workers.train.microbatches import Microbatch, RoutedTokens, Segments, rounded

ModelPass = Callable[[Any, Microbatch], Tensor]
"""Runs a model chunk on a microbatch and returns its output, with an autograd graph if gradients are enabled."""

MOST_RECORDINGS = 64
FEWEST_SEGMENTS = 8


def plain_pass(chunk: Any, microbatch: Microbatch) -> Tensor:
    """Runs the pass without a graph."""
    output: Tensor = chunk(microbatch.tokens, microbatch.positions, LayerInputs.of(microbatch))
    return output


@dataclass(frozen=True)
class _Capacity:
    """Capacity of a recording for segments. Count and lengths are rounded up; kernels skip empty segments."""

    number: int
    longest_query: int
    longest_key: int
    prefixes: _Capacity | None

    @staticmethod
    def of(segments: Segments | None) -> _Capacity | None:
        """Returns the capacity for segments like these."""
        if segments is None:
            return None
        number = rounded(len(segments.query_lengths), FEWEST_SEGMENTS)
        return _Capacity(number, segments.rounded_query, segments.rounded_key, _Capacity.of(segments.prefixes))

    def allocate(self, segments: Segments) -> Segments:
        """Copies segments to static memory of this capacity."""
        queries, keys = (_padded(starts, self.number + 1) for starts in (segments.query_starts, segments.key_starts))
        order = None if segments.key_order is None else segments.key_order.clone()
        prefixes = self.prefixes.allocate(segments.prefixes) if self.prefixes and segments.prefixes else None
        return Segments((self.longest_query,), (self.longest_key,), queries, keys, order, (), prefixes)


@dataclass(frozen=True)
class _PassShape:
    """The key under which microbatches share a recording: shape of `tokens` [b, s], gradients, and segment capacity.

    `replayed`: whether routers take recorded experts.
    """

    tokens: tuple[int, ...]
    backward: bool
    segments: _Capacity | None
    replayed: bool

    @staticmethod
    def of(microbatch: Microbatch) -> _PassShape:
        """Returns the shape of a microbatch in the current gradient mode."""
        shape, capacity = tuple(microbatch.tokens.shape), _Capacity.of(microbatch.segments)
        replayed = microbatch.routed is not None and microbatch.routed.experts is not None
        return _PassShape(shape, torch.is_grad_enabled(), capacity, replayed)

    def allocate(self, microbatch: Microbatch) -> Microbatch:
        """Copies the microbatch to static memory for recording. Later microbatches are copied into it."""
        segments = self.segments.allocate(microbatch.segments) if self.segments and microbatch.segments else None
        tokens, positions, routed = microbatch.tokens.clone(), microbatch.positions.clone(), microbatch.routed
        if routed is not None:
            routed = RoutedTokens(routed.valid.clone(), None if routed.experts is None else routed.experts.clone())
        return replace(microbatch, tokens=tokens, positions=positions, data={}, segments=segments, routed=routed)


class RecordedPasses:
    """A `ModelPass` for models of one chunk that records passes as graphs and replays them.

    A pass with gradients must be followed by its backward pass before the next. `weights` are the model's, `gradients` the
    buffers of theirs. Other memory of a step, such as the counts of routers, may not move before `forget`. Call it on one
    non-default CUDA stream, the one on which the model was wrapped for data parallelism: the default stream cannot be
    captured, and autograd adds gradients on the stream of the wrapping.
    """

    def __init__(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self._weights, self._gradients = weights, gradients
        self._pool = torch.cuda.graph_pool_handle()  # graphs run one at a time and share memory
        self._recordings: dict[Any, _Recording | None] = {}  # least recently used first; None: seen once

    def __call__(self, chunk: Any, microbatch: Microbatch) -> Tensor:
        """Runs the pass over a microbatch."""
        shape = _PassShape.of(microbatch)
        key = (shape, *map(torch.Tensor.data_ptr, (*self._weights, *self._gradients)))
        if key not in self._recordings:
            self._keep(key, None)
            return plain_pass(chunk, microbatch)
        recording = self._recordings.pop(key) or _Recording(chunk, shape, microbatch, self._pool)
        self._keep(key, recording)
        return recording.replay(microbatch)

    def forget(self) -> None:
        """Drops all graphs. Works from any thread; a running pass raises RunError when it needs one."""
        for recording in list(self._recordings.values()):
            if recording is not None:
                recording.drop()
        self._recordings.clear()

    @property
    def count(self) -> int:
        """Number of recorded shapes."""
        return sum(recording is not None for recording in self._recordings.values())

    def _keep(self, key: Any, recording: _Recording | None) -> None:
        self._recordings[key] = recording
        while len(self._recordings) > MOST_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]


class _Recording:
    """A forward graph and, with gradients, a backward graph, and their static inputs and outputs."""

    def __init__(self, chunk: Any, shape: _PassShape, microbatch: Microbatch, pool: Any) -> None:
        self._input = shape.allocate(microbatch)
        self._backward_too = shape.backward
        self._graphs = [torch.cuda.CUDAGraph() for _ in range(1 + shape.backward)]
        try:
            self._output = self._record(chunk, pool)
        except BaseException:
            for graph in self._graphs:
                graph.reset()  # now: the traceback refers to the graphs, and an abort waits for their end
            raise
        # Sequence parallelism gathers inputs into Megatron's buffers, which Megatron replaces by larger ones. Keep these.
        self._gathered = list(get_global_memory_buffer().buffer.values())

    def _record(self, chunk: Any, pool: Any) -> Tensor:
        with _recorded(self._graphs[0], pool):
            output = plain_pass(chunk, self._input)
        if self._backward_too:
            self._gradient = torch.empty_like(output)
            self._anchor = torch.zeros((), device=output.device, requires_grad=True)
            with _recorded(self._graphs[1], pool):
                torch.autograd.backward(output, self._gradient)
        return output.detach()

    def drop(self) -> None:
        """Drops the graphs, even if this recording is still referenced."""
        self._graphs = []

    def replay(self, microbatch: Microbatch) -> Tensor:
        """Runs the pass over a microbatch of this shape. The next replay overwrites the output."""
        for target, source in zip(_tensors(self._input), _tensors(microbatch), strict=True):
            target.copy_(source if len(source) == len(target) else _padded(source, len(target)))
        if not self._backward_too:
            return self.forward()
        output: Tensor = _ReplayedPass.apply(self._anchor, self)  # type: ignore[no-untyped-call]
        return output

    def forward(self) -> Tensor:
        """Replays the forward pass."""
        self._graph(0).replay()
        return self._output.detach()

    def backward(self, gradient: Tensor) -> None:
        """Replays the backward pass, which adds gradients to Megatron's buffers."""
        self._gradient.copy_(gradient)
        self._graph(1).replay()

    def _graph(self, number: int) -> torch.cuda.CUDAGraph:
        graphs = self._graphs
        if not graphs:
            raise RunError("an abort or an offload dropped the CUDA graphs of this pass while it ran; replay the phase")
        return graphs[number]


def _tensors(microbatch: Microbatch) -> Iterator[Tensor]:
    """Yields the tensors that a pass reads, in an order that microbatches of one shape share."""
    yield from (microbatch.tokens, microbatch.positions)
    if microbatch.routed is not None:
        yield microbatch.routed.valid
        if microbatch.routed.experts is not None:
            yield microbatch.routed.experts
    segments = microbatch.segments
    while segments is not None:
        yield from (segments.query_starts, segments.key_starts)
        if segments.key_order is not None:
            yield segments.key_order
        segments = segments.prefixes


def _padded(values: Tensor, length: int) -> Tensor:
    """Repeats the last entry up to `length`: further offsets are those of empty segments."""
    return torch.cat([values, values[-1:].expand(length - len(values), *values.shape[1:])])


class _ReplayedPass(torch.autograd.Function):
    """A recording as an autograd function. Its gradients are added to Megatron's buffers, none to the anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: _Recording) -> Tensor:
        ctx.recording = recording
        return recording.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.recording.backward(gradients[0])
        return None, None


def _recorded(graph: torch.cuda.CUDAGraph, pool: Any) -> Any:
    """Captures the block as `graph`. Other threads, such as NCCL's watchdog, may call CUDA meanwhile."""
    stream = torch.cuda.current_stream()
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
