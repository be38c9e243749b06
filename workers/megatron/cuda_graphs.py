"""CUDA graphs of a model's passes over a microbatch: forward and backward, recorded once for each shape and replayed.

Where microbatches are small, or a model is cut over many workers, a step is as long as it takes the host to launch its
kernels. A replay is one launch. Recorded is what runs between the tokens and the last hidden states, and on the way back
also that each parameter's gradient is added to Megatron's buffers; the loss is computed as ever. The first microbatch of a
shape runs as it does without graphs, and the second is recorded, so that no kernel is compiled or chosen in a recording.

A graph reads and writes the addresses that it was recorded with. Those of all parameters and gradient buffers are a part of
what it is found by, so that a model whose memory has moved is recorded again. See PyTorch's notes on CUDA graphs
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). Imported only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from dagrl.errors import RunError
from workers.megatron.microbatches import Microbatch
from workers.megatron.segments import Segments

ModelPass = Callable[[Any, Microbatch], Tensor]
"""A chunk of the model and a microbatch -> what the chunk makes of it, with its autograd graph unless that is off."""

MOST_RECORDINGS = 64
FEWEST_SEGMENTS, SHORTEST_SEGMENT = 8, 256


def plain_pass(chunk: Any, microbatch: Microbatch) -> Tensor:
    """Launches every kernel by itself."""
    output: Tensor = chunk(microbatch.tokens, microbatch.positions, microbatch.segments)
    return output


@dataclass(frozen=True)
class _Shape:
    """What microbatches that share a recording have alike: `tokens` [b, s], whether gradients are wanted, and room for
    segments, whose number and lengths are rounded up: kernels leave out what is not there."""

    tokens: tuple[int, ...]
    backward: bool
    segments: int
    longest_query: int
    longest_key: int

    @staticmethod
    def of(microbatch: Microbatch) -> _Shape:
        """That of a microbatch, on the way that the pass is wanted now."""
        shape, backward, segments = tuple(microbatch.tokens.shape), torch.is_grad_enabled(), microbatch.segments
        if segments is None:
            return _Shape(shape, backward, 0, 0, 0)
        number = _rounded(len(segments.query_lengths), FEWEST_SEGMENTS)
        query = min(_rounded(segments.longest_query, SHORTEST_SEGMENT), sum(segments.query_lengths))
        key = min(_rounded(segments.longest_key, SHORTEST_SEGMENT), sum(segments.key_lengths))
        return _Shape(shape, backward, number, query, key)

    def room(self, microbatch: Microbatch) -> Microbatch:
        """A copy that a graph of this shape may be recorded with; later ones are filled into it."""
        segments = microbatch.segments
        if segments is not None:
            queries, keys = (_filled_up(one, self.segments + 1) for one in (segments.query_starts, segments.key_starts))
            order = None if segments.key_order is None else segments.key_order.clone()
            segments = Segments((self.longest_query,), (self.longest_key,), queries, keys, order)
        tokens, positions = microbatch.tokens.clone(), microbatch.positions.clone()
        return Microbatch(tokens, microbatch.labels, positions, microbatch.targets, {}, segments)


def _rounded(number: int, least: int) -> int:
    """The next power of two, `least` or more."""
    return max(least, 1 << (number - 1).bit_length())


def _filled_up(starts: Tensor, number: int) -> Tensor:
    """Offsets of as many segments as are missing, all empty and at the end."""
    return torch.cat([starts, starts[-1:].expand(number - len(starts))])


class RecordedPasses:
    """Passes of a model of one chunk; those of a shape seen before are replays. Call as a `ModelPass`.

    A pass with gradients is to be followed by its way back before the next. `parameters` are the model's and `gradients`
    their buffers. Calls are made on one CUDA stream that is not the default one, as the wrapping of the model in Megatron's
    data parallelism was: nothing can be recorded on the default stream, and gradients are added where that happened.
    """

    def __init__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self._parameters, self._gradients = parameters, gradients
        self._pool = torch.cuda.graph_pool_handle()  # one graph runs at a time: all have the same memory
        self._recordings: dict[Any, _Recording | None] = {}  # the last used last; None: seen once

    def __call__(self, chunk: Any, microbatch: Microbatch) -> Tensor:
        """The pass over a microbatch."""
        shape = _Shape.of(microbatch)
        found = (shape, *map(torch.Tensor.data_ptr, (*self._parameters, *self._gradients)))
        if found not in self._recordings:
            self._keep(found, None)
            return plain_pass(chunk, microbatch)
        recording = self._recordings.pop(found) or _Recording(chunk, shape, microbatch, self._pool)
        self._keep(found, recording)
        return recording.replay(microbatch)

    def forget(self) -> None:
        """From any thread: drop all graphs, also of a pass that is under way, which raises RunError when it needs one."""
        for recording in list(self._recordings.values()):
            if recording is not None:
                recording.drop()
        self._recordings.clear()

    @property
    def count(self) -> int:
        """Shapes that are recorded."""
        return sum(recording is not None for recording in self._recordings.values())

    def _keep(self, found: Any, recording: _Recording | None) -> None:
        self._recordings[found] = recording
        while len(self._recordings) > MOST_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]


class _Recording:
    """A graph of the way forward and, where gradients are wanted, one of the way back; what they read and write."""

    def __init__(self, chunk: Any, shape: _Shape, microbatch: Microbatch, pool: Any) -> None:
        self._input = shape.room(microbatch)
        self._backward_too = shape.backward
        self._graphs = [torch.cuda.CUDAGraph() for _ in range(1 + shape.backward)]
        try:
            self._output = self._record(chunk, pool)
        except BaseException:
            for graph in self._graphs:
                graph.reset()  # at once: the error's traceback refers to them, and an abort waits for their end
            raise
        # Where sequences are parallel, inputs are gathered into buffers that Megatron replaces when a larger one is wanted.
        self._gathered = list(get_global_memory_buffer().buffer.values())

    def _record(self, chunk: Any, pool: Any) -> Tensor:
        with _without_forks():
            with _recorded(self._graphs[0], pool):
                output = plain_pass(chunk, self._input)
            if self._backward_too:
                self._gradient = torch.empty_like(output)
                self._anchor = torch.zeros((), device=output.device, requires_grad=True)
                with _recorded(self._graphs[1], pool):
                    torch.autograd.backward(output, self._gradient)
        return output.detach()

    def drop(self) -> None:
        """Let go of the graphs, whoever still refers to this recording."""
        self._graphs = []

    def replay(self, microbatch: Microbatch) -> Tensor:
        """The pass over a microbatch of the recording's shape; its output is overwritten by the next."""
        self._fill(microbatch)
        if not self._backward_too:
            return self.forward()
        output: Tensor = _Replay.apply(self._anchor, self)  # type: ignore[no-untyped-call]
        return output

    def forward(self) -> Tensor:
        """Replay what was recorded of the way forward."""
        self._graph(0).replay()
        return self._output.detach()

    def backward(self, gradient: Tensor) -> None:
        """Replay the way back: gradients are added to Megatron's buffers."""
        self._gradient.copy_(gradient)
        self._graph(1).replay()

    def _graph(self, number: int) -> torch.cuda.CUDAGraph:
        graphs = self._graphs
        if not graphs:
            raise RunError("the CUDA graphs of this pass were dropped while it ran, by an abort or an offload")
        return graphs[number]

    def _fill(self, microbatch: Microbatch) -> None:
        self._input.tokens.copy_(microbatch.tokens)
        self._input.positions.copy_(microbatch.positions)
        here, there = self._input.segments, microbatch.segments
        if here is None or there is None:
            return
        here.query_starts.copy_(_filled_up(there.query_starts, len(here.query_starts)))
        here.key_starts.copy_(_filled_up(there.key_starts, len(here.key_starts)))
        if here.key_order is not None and there.key_order is not None:
            here.key_order.copy_(there.key_order)


class _Replay(torch.autograd.Function):
    """A recording as autograd sees it: its gradients go to Megatron's buffers, none to the anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recording: _Recording) -> Tensor:
        ctx.recording = recording
        return recording.forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.recording.backward(gradients[0])
        return None, None


def _recorded(graph: torch.cuda.CUDAGraph, pool: Any) -> Any:
    """What is launched in the block becomes `graph`. Other threads may call CUDA meanwhile, NCCL's watchdog for one."""
    stream = torch.cuda.current_stream()
    return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


@contextmanager
def _without_forks() -> Iterator[None]:
    """No look at the random generator's state: Megatron has one around dropout, of which no model here has any."""
    tracker = get_cuda_rng_tracker()
    tracker.fork = nullcontext
    try:
        yield
    finally:
        del tracker.fork
