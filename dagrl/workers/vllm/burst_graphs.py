"""CUDA graphs of the later steps of a burst: all that vLLM's second model runner does in a decode step but the model.

Between two runs of the model, which have graphs of their own, the runner launches some 40 small kernels and copies from
Python: positions, slots and the attention's schedule, then sampling, log-probabilities and the requests' state. With few
sequences or a small model that takes longer than the GPU computes. The requests of a burst do not change, and what changes
from step to step is on the GPU. So the runner's own functions are captured once and replayed: two launches a step.

A graph serves every batch that is padded to its size. Padding rows belong to a slot without a request. They have no query,
no key and no token to write, as in the runner's own padded steps.

Written against vLLM 0.26. `BurstGraphs.of` returns None for other releases, and for models with parts that are prepared on
the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RELEASES = ("0.26.",)  # releases of vLLM whose model runner these steps are of

FEWEST_FILTERED = 8
"""Rows from which on vLLM applies top-k and top-p by one kernel; a padded batch of fewer might take another."""


class LaterSteps:
    """Tokens and log-probabilities of the later steps of a burst, on their way to the host."""

    def __init__(self, found: tuple[Tensor, ...], runner: Any) -> None:
        """`found` are [steps, rows] each."""
        import torch

        self._kept = found  # until they are copied
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        stream = runner.output_copy_stream
        stream.wait_stream(runner.main_stream)
        with torch.cuda.stream(stream):
            self._host = [values.to("cpu", non_blocking=True).numpy() for values in found]
            self._copied.record(stream)

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """Waits for the copy, and returns both [steps, rows]."""
        self._copied.synchronize()
        return self._host


@dataclasses.dataclass
class _Size:
    """The graph of one padded batch size. `after_and_before` ends a step and begins the next one."""

    padded: Any
    batch: Any
    after_and_before: torch.cuda.CUDAGraph | None = None
    scratch: tuple[Tensor, ...] = ()  # which the graph writes, and vLLM would replace by larger ones


class BurstGraphs:
    """Runs the later steps of bursts on a model runner. `most` is the largest number of them."""

    def __init__(self, runner: Any, most: int) -> None:
        import torch

        self._runner = runner
        self._sizes: dict[tuple[int, tuple[bool, ...]], _Size] = {}
        rows, device = runner.max_num_reqs, runner.device
        self._found = (
            torch.zeros(most, rows, dtype=torch.int64, device=device),
            torch.zeros(most, rows, dtype=torch.float32, device=device),
        )
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._slots = torch.zeros(rows, dtype=torch.int32, device=device)  # of each row's request
        self._hidden = torch.zeros(rows, dtype=torch.int64, device=device)  # row of its hidden state
        states = runner.sampler.sampling_states
        hosted = (states.temperature, states.top_k, states.top_p, states.min_p, states.seeds, runner.req_states.prefill_len)
        self._hosted = [(values, values.gpu.clone()) for values in hosted]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        tables = runner.block_tables
        # Sleep frees the memory of the tables' layout, and each wake-up allocates it at other addresses, which captured
        # graphs do not know. So it is allocated once, outside that memory; the tables that it points to stay in place.
        tables.init_block_table_layout_tensors()
        tables.init_block_table_layout_tensors = lambda: None

    @staticmethod
    def of(executor: Any, most: int) -> BurstGraphs | None:
        """Returns the graphs of the engine behind `executor`, or None if it has steps that cannot be replayed."""
        import vllm

        runner = executor.driver_worker.worker.model_runner
        config = executor.vllm_config
        plain = (
            vllm.__version__.startswith(RELEASES)
            and type(runner).__module__ == "vllm.v1.worker.gpu.model_runner"
            and runner.cudagraph_manager is not None
            and config.parallel_config.world_size == 1
            and config.compilation_config.cudagraph_mode.has_full_cudagraphs()
            and config.lora_config is None
            and config.speculative_config is None
            and not runner.supports_mm_inputs
            and type(runner.model_state).__name__ == "DefaultModelState"
            and runner.model_state.rope_state is None
            and all(group.backend.get_name() == "FLASH_ATTN" for groups in runner.attn_groups for group in groups)
        )
        return BurstGraphs(runner, most) if plain else None

    @property
    def batch(self) -> Any:
        """The batch of the step whose model has run, until the runner samples."""
        return self._runner.execute_model_state.input_batch

    def run(self, batch: Any, steps: int) -> LaterSteps | None:
        """Runs `steps` steps after the one that has just sampled `batch`. None if it has no graph: nothing ran then."""
        import torch
        from vllm.v1.sample.ops import topk_topp_triton

        with torch.inference_mode():
            size = self._size(batch)
            if size is None:
                return None
            self._enter(batch, size)
            self._before(size.batch)
            for step in range(steps):
                self._runner.cudagraph_manager.run_fullgraph(size.padded)
                if size.after_and_before is None:  # compiles what the graph will launch
                    self._after_and_before(size.batch)
                    size.after_and_before = self._captured(size.batch) if step + 1 < steps else None
                    size.scratch = tuple(topk_topp_triton._TRITON_BUFFER_CACHE.values())
                else:
                    size.after_and_before.replay()
            found = tuple(values[:steps, : batch.num_reqs].clone() for values in self._found)
            return LaterSteps(found, self._runner)

    def _size(self, batch: Any) -> _Size | None:
        """Returns what runs a batch of this size and kind, or None."""
        from vllm.config.compilation import CUDAGraphMode

        runner, rows = self._runner, batch.num_reqs
        states, slots = runner.sampler.sampling_states, batch.idx_mapping_np
        padded = runner.cudagraph_manager.dispatch(rows, rows, 1, 0)
        if padded.cg_mode != CUDAGraphMode.FULL or (padded.num_tokens > rows and not runner.req_states.free_indices):
            return None
        temperatures = states.temperature.np[slots]
        used = (  # each has a kernel of its own
            (temperatures != 0.0) & (temperatures != 1.0),
            states.min_p.np[slots] != 0.0,
            states.top_k.np[slots] != states.vocab_size,
            states.top_p.np[slots] != 1.0,
        )
        features = tuple(bool(np.any(rows)) for rows in used)
        if np.any(states.num_logprobs[slots] != 0) or (any(features[2:]) and rows < FEWEST_FILTERED):
            return None
        key = padded.num_tokens, features
        if key not in self._sizes:
            self._sizes[key] = self._make(batch, padded)
        return self._sizes[key]

    def _make(self, batch: Any, padded: Any) -> _Size:
        """Returns a size whose batch has the tensors of the runner that the model's graph reads."""
        import torch

        runner, count = self._runner, padded.num_tokens
        buffers, device = runner.input_buffers, runner.device
        own = dataclasses.replace(
            batch,
            req_ids=[*batch.req_ids, *[""] * (count - batch.num_reqs)],
            num_reqs=count,
            num_reqs_after_padding=count,
            idx_mapping=self._slots[:count],
            idx_mapping_np=np.zeros(count, np.int32),
            expanded_idx_mapping=self._slots[:count],
            expanded_local_pos=torch.zeros(count, dtype=torch.int32, device=device),
            num_scheduled_tokens=np.ones(count, np.int32),
            num_tokens=count,
            num_tokens_after_padding=count,
            query_start_loc=buffers.query_start_loc[: count + 1],
            query_start_loc_np=np.arange(count + 1, dtype=np.int32),
            seq_lens=buffers.seq_lens[:count],
            seq_lens_cpu_upper_bound=torch.full((count,), runner.max_model_len, dtype=torch.int32),
            is_prefilling_np=np.zeros(count, bool),
            input_ids=buffers.input_ids[:count],
            positions=buffers.positions[:count],
            is_padding=buffers.is_padding[:count],
            logits_indices=self._hidden[:count],
            cu_num_logits=torch.arange(count + 1, dtype=torch.int32, device=device),
            cu_num_logits_np=np.arange(count + 1, dtype=np.int32),
        )
        return _Size(padded, own)

    def _enter(self, batch: Any, size: _Size) -> None:
        """Copies to the GPU what stays the same in the burst."""
        import torch
        from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu

        states, rows, count = self._runner.req_states, batch.num_reqs, size.batch.num_reqs
        slots = np.empty(count, np.int32)
        slots[:rows] = batch.idx_mapping_np
        size.batch.idx_mapping_np[:] = np.resize(slots[:rows], count)  # read for which features of the sampler are in use
        for values, copy in self._hosted:
            copy.copy_(values.gpu, non_blocking=True)
        if rows < count:
            spare = states.free_indices[0]
            slots[rows:] = spare
            states.num_computed_tokens.gpu[spare : spare + 1].zero_()
            self._hosted[-1][1][spare : spare + 1].fill_(1)  # a prompt of which nothing is computed: no token is taken
        async_copy_to_gpu(slots, out=self._slots[:count])
        torch.arange(count, out=self._hidden[:count]).clamp_(max=rows - 1)
        self._step.zero_()

    def _before(self, batch: Any) -> None:
        """Prepares the model's inputs, as the runner's `prepare_inputs` and `prepare_attn` do."""
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens

        runner, states, buffers = self._runner, self._runner.req_states, self._runner.input_buffers
        slots, start, count = batch.idx_mapping, batch.query_start_loc, batch.num_reqs
        prepare_pos_seq_lens(slots, start, states.num_computed_tokens.gpu, buffers.positions, buffers.seq_lens)
        combine_sampled_and_draft_tokens(
            buffers.input_ids,
            slots,
            states.last_sampled_tokens,
            start,
            batch.seq_lens,
            self._hosted[-1][1],
            states.draft_tokens,
            batch.cu_num_logits,
            count,
        )
        tables = runner.block_tables
        mappings = tables.compute_slot_mappings(slots, start, buffers.positions, num_tokens_padded=count)
        blocks = tables.get_dummy_block_tables(count)  # as the burst's first step has gathered them
        groups, cache = runner.attn_groups, runner.kv_cache_config
        runner.model_state.prepare_attn(batch, CUDAGraphMode.FULL, blocks, mappings, groups, cache)

    def _after_and_before(self, batch: Any) -> None:
        """Samples, updates the requests' state, keeps what was sampled, and prepares the next step."""
        runner, count = self._runner, batch.num_reqs
        with self._on_device():
            output, sampled, rejected = runner.sample(runner.cudagraph_manager.hidden_states[:count], batch, None)
            tokens, scores = output.sampled_token_ids, output.logprobs_tensors
            runner.postprocess_sampled(batch.idx_mapping, tokens, sampled, rejected, batch.query_start_loc)
        for kept, values in zip(self._found, (tokens, scores.logprobs), strict=True):
            kept[:, :count].index_copy_(0, self._step, values.view(1, count))
        self._step += 1
        self._before(batch)

    def _captured(self, batch: Any) -> torch.cuda.CUDAGraph:
        """Returns a graph of `_after_and_before`."""
        import torch
        from vllm.platforms import current_platform

        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=current_platform.get_global_graph_pool(), capture_error_mode="thread_local")
            try:
                self._after_and_before(batch)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Lets the runner read the requests' parameters from GPU memory that stays, not from the host's rotating buffers."""
        hosted = [(values, values.gpu) for values, _ in self._hosted]
        for values, copy in self._hosted:
            values.gpu = copy
        try:
            yield
        finally:
            for values, own in hosted:
                values.gpu = own
