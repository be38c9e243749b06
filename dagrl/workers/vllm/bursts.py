"""Bursts: several decode steps for each run of vLLM's scheduler.

vLLM's scheduler and its bookkeeping take some Python for each request and step. With hundreds of sequences and a small model
that is longer than the GPU computes. While all requests decode, one run of the scheduler is good for
several steps: each step adds one token to each request, in memory that can be reserved before. vLLM called this multi-step
scheduling before its present engine.

A burst looks to the scheduler like one step that made several tokens of each request, as speculative decoding does, and to
the model runner like that many steps. A request that ends inside a burst is computed to the burst's end; what was made after
its end is dropped. Samples and log-probabilities are those of single steps.

A step that admits requests is no burst, and where requests end all the time each step of a full engine would admit some. So
a burst follows each step that admitted a few, and the requests that come meanwhile are admitted together after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.errors import RunError
from dagrl.workers.vllm.burst_graphs import BurstGraphs

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import ModelRunnerOutput

    from dagrl.workers.vllm.burst_graphs import LaterSteps

ONCE: dict[str, Any] = {
    "finished_req_ids": set(),
    "preempted_req_ids": set(),
    "free_encoder_mm_hashes": [],
    "new_block_ids_to_zero": None,
    "kv_cache_block_copies": None,
}
"""Fields of a scheduler's output that the first step of a burst carries out for all, with their values in later steps."""

FEW = 1 / 8  # new requests are few if they are less than this share of those that run


class Bursts:
    """Wraps the scheduler and the executor of an engine in this process, so that each decode step becomes a burst.

    Bursts have at most `steps` steps, and at most `limit`, which the caller sets before each engine step. `taken` is the
    number of steps that the last one began. Every rank of an engine decides the same, from the scheduler's state.
    """

    def __init__(self, core: EngineCore, steps: int) -> None:
        self.limit, self.taken = steps, 1
        self._steps = steps
        self._scheduler: Any = core.scheduler
        executor: Any = core.model_executor
        self._block_size = int(core.vllm_config.cache_config.block_size)
        self._asynchronous = bool(core.vllm_config.scheduler_config.async_scheduling)
        self._burst: SchedulerOutput | None = None
        self._first: SchedulerOutput | None = None
        self._admitted_few = False  # in the last step
        self._graphs = BurstGraphs.of(executor, steps - 1)
        self._schedule, self._execute, self._sample = (
            self._scheduler.schedule,
            executor.execute_model,
            executor.sample_tokens,
        )
        self._scheduler.schedule, executor.execute_model, executor.sample_tokens = (
            self.schedule,
            self.execute_model,
            self.sample_tokens,
        )

    def schedule(self, *args: Any) -> SchedulerOutput:
        """Schedules a step or a burst."""
        from vllm.v1.core.sched.interface import PauseState

        scheduler, steps = self._scheduler, self._possible()
        lookahead, state = scheduler.num_lookahead_tokens, scheduler.pause_state
        scheduler.num_lookahead_tokens = lookahead + steps - 1  # reserves memory for the tokens of all steps
        wait = self._admitted_few and steps > 1 and state == PauseState.UNPAUSED
        if wait:
            scheduler.set_pause_state(PauseState.PAUSED_NEW)
        try:
            output: SchedulerOutput = self._schedule(*args)
        finally:
            scheduler.num_lookahead_tokens = lookahead
            if wait:
                scheduler.set_pause_state(state)
        self._admitted_few = self._few(output)
        self._first, self.taken = None, 1
        if steps == 1 or not _only_decodes(output):
            return output
        self._first, self.taken = output, steps
        self._advance(output, steps - 1)
        tokens = dict.fromkeys(output.num_scheduled_tokens, steps)
        self._burst = dataclasses.replace(
            output, num_scheduled_tokens=tokens, total_num_scheduled_tokens=steps * len(tokens)
        )
        return self._burst

    def execute_model(self, output: SchedulerOutput, non_block: bool = False) -> Any:
        """Executes the model for a step, or for the first step of a burst."""
        if output is not self._burst:
            return self._execute(output, non_block=non_block)
        self._burst = None
        return self._execute(self._first, non_block=non_block)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        """Samples, and does the later steps of a burst. The GPU runs behind: no step waits for the tokens of another."""
        first, self._first = self._first, None
        if first is None:
            return self._sample(grammar, non_block=non_block)
        graphs = self._graphs
        batch = None if graphs is None else graphs.batch
        outputs = [self._sample(grammar, non_block=non_block)]
        replayed = None if graphs is None else graphs.run(batch, self.taken - 1)
        if replayed is None:
            for number in range(1, self.taken):
                self._execute(_later_step(first, number), non_block=non_block)
                outputs.append(self._sample(None, non_block=non_block))
        return _JoinedFuture(outputs, replayed) if non_block else _joined(outputs, replayed)

    def _possible(self) -> int:
        """Returns the length of the next burst: as many steps as there is memory for, 1 while a request is prefilled.

        Waiting requests do not prevent a burst. The scheduler admits one if there is memory for it and the burst, which then
        becomes a step. With less memory, a request admitted now would be preempted before as many steps have passed.
        """
        scheduler, running = self._scheduler, self._scheduler.running
        if not running or any(request.is_prefill_chunk for request in running):
            return 1
        tokens = np.array([request.num_computed_tokens for request in running])
        remaining = max(
            request.max_tokens - request.num_output_tokens - request.num_output_placeholders for request in running
        )
        steps: int = min(self._steps, self.limit, remaining, scheduler.max_model_len - 1 - int(tokens.max()))
        pool, groups = scheduler.kv_cache_manager.block_pool, len(scheduler.kv_cache_config.kv_cache_groups)
        room = -tokens % self._block_size  # of each request's last block
        while steps > 1 and groups * int(np.sum(-((room - steps) // self._block_size))) > pool.get_num_free_blocks():
            steps -= 1
        return max(steps, 1)

    def _few(self, output: SchedulerOutput) -> bool:
        """Returns whether a step admitted a few requests, as there was no place for more or none to admit."""
        admitted = len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids)
        room = output.total_num_scheduled_tokens < self._scheduler.max_num_scheduled_tokens
        return room and 0 < admitted < FEW * len(self._scheduler.running)

    def _advance(self, output: SchedulerOutput, tokens: int) -> None:
        """Counts the tokens of later steps as those of the first one were."""
        for name in output.num_scheduled_tokens:
            request = self._scheduler.requests[name]
            request.num_computed_tokens += tokens
            request.num_in_flight_tokens += tokens
            if self._asynchronous:
                request.num_output_placeholders += tokens


def _only_decodes(output: SchedulerOutput) -> bool:
    """Returns whether each scheduled request continues by one token."""
    return (
        0 < output.total_num_scheduled_tokens == len(output.num_scheduled_tokens)
        and not output.scheduled_new_reqs
        and not output.scheduled_cached_reqs.resumed_req_ids
        and not output.scheduled_spec_decode_tokens
        and len(output.scheduled_cached_reqs.req_ids) == len(output.num_scheduled_tokens)
    )


def _later_step(output: SchedulerOutput, number: int) -> SchedulerOutput:
    """Returns the step `number` steps after `output`, with the same requests."""
    cached = output.scheduled_cached_reqs
    continued = dataclasses.replace(
        cached,
        all_token_ids={},
        new_block_ids=[None] * len(cached.req_ids),
        num_computed_tokens=[tokens + number for tokens in cached.num_computed_tokens],
        num_output_tokens=[tokens + number for tokens in cached.num_output_tokens],
    )
    fields = {name: value for name, value in ONCE.items() if hasattr(output, name)}
    return dataclasses.replace(output, scheduled_cached_reqs=continued, **fields)


def _joined(outputs: Sequence[ModelRunnerOutput | None], replayed: LaterSteps | None) -> ModelRunnerOutput:
    """Returns one output with the tokens of all steps: of `outputs`, then of the steps that were replayed.

    Raises RunError if the steps computed different requests.
    """
    steps = [output for output in outputs if output is not None]
    first = steps[0]
    if len(steps) < len(outputs) or any(step.req_ids != first.req_ids for step in steps):
        raise RunError("the steps of a burst did not compute the same requests; restart the generation workers")
    tokens = np.stack([[step[0] for step in output.sampled_token_ids] for output in steps])  # [steps, requests]
    parts = [output.logprobs for output in steps if output.logprobs is not None]
    ids = [part.logprob_token_ids for part in parts]
    logprobs, ranks = [part.logprobs for part in parts], [part.sampled_token_ranks for part in parts]
    if replayed is not None:
        later = replayed.arrays()
        tokens = np.concatenate((tokens, later[0]))
        ids += list(later[0][..., None])
        logprobs += list(later[1][..., None])
        ranks += list(later[0])  # which nothing reads
    scores = first.logprobs
    if scores is not None:
        scores = scores._replace(
            logprob_token_ids=_by_request(ids),
            logprobs=_by_request(logprobs),
            sampled_token_ranks=_by_request(ranks),
            cu_num_generated_tokens=list(range(0, tokens.size + 1, len(tokens))),
        )
    return dataclasses.replace(first, sampled_token_ids=tokens.T.tolist(), logprobs=scores)


def _by_request(steps: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Joins arrays [requests, ...] of steps into [requests * steps, ...], request by request."""
    joined = np.stack(steps, axis=1)
    return joined.reshape(-1, *joined.shape[2:])


class _JoinedFuture(Future[Any]):
    """The output of a burst, joined when it is asked for."""

    def __init__(self, parts: Sequence[Future[Any]], replayed: LaterSteps | None) -> None:
        super().__init__()
        self._parts, self._replayed = parts, replayed

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def result(self, timeout: float | None = None) -> Any:
        return _joined([part.result(timeout) for part in self._parts], self._replayed)
