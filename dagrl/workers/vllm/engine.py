"""QuantumEngine: one vLLM engine rank that takes requests and runs a bounded number of steps.

With asynchronous scheduling vLLM prepares a step while the previous one computes, also across quanta: the last step of a
quantum returns its tokens in the next one, so the GPU stays busy. Every other operation first drains the engine, so no step
runs on weights that a refit is writing. Requests keep their KV cache. Versions change only in a drained engine, so the
policy version of every token is known.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dagrl.config import GenerationConfig
from dagrl.errors import DataError, RunError
from dagrl.rl.generation import (
    AS_CONFIGURED,
    FinishedRequest,
    Generated,
    IntArray,
    RequestOptions,
    RequestProgress,
    checksum,
    disagreement,
    pack_generated,
)
from dagrl.workers.vllm import features
from dagrl.workers.vllm.bursts import Bursts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from vllm import LLMEngine, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreOutput

    from dagrl.workers.vllm.expert_recorder import ExpertRecorder
    from dagrl.workers.vllm.media import EngineMedia


@dataclass(frozen=True)
class Request:
    """A prompt to continue by at most `max_new_tokens`. Tokens are sampled with `seed`, or `greedy` takes the likeliest."""

    request_id: int
    prompt: Sequence[int]
    seed: int
    max_new_tokens: int
    greedy: bool
    options: RequestOptions = AS_CONFIGURED
    media: Sequence[int] = ()
    """The medium that each token of the prompt stands for (`dagrl.data.media`), or nothing if the prompt is a text."""


def sampling_params(
    config: GenerationConfig, stop_token_ids: Sequence[int], max_model_len: int, request: Request
) -> SamplingParams:
    """Returns the parameters. `stop_token_ids` end a request, unless the configuration forces its length."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options, stops = request.options, [*config.stop_strings, *request.options.stop]
    temperature = config.temperature if options.temperature is None else options.temperature
    forced = config.forced_lengths is not None
    return SamplingParams(
        temperature=0.0 if request.greedy else temperature,
        top_p=config.top_p if options.top_p is None else options.top_p,
        top_k=config.top_k or 0,
        seed=request.seed,
        max_tokens=min(request.max_new_tokens, max_model_len - len(request.prompt)),
        stop=[] if forced else stops,
        stop_token_ids=[] if forced else list(stop_token_ids),
        ignore_eos=forced,
        detokenize=bool(stops) and not forced,
        logprobs=0,  # of the sampled token only
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def warmup_params(config: GenerationConfig) -> SamplingParams:
    """Returns the parameters with which an engine compiles its sampling kernels. Greedy requests need no others."""
    length = config.max_new_tokens
    return sampling_params(config, (), length, Request(0, (), seed=0, max_new_tokens=length, greedy=False))


_NO_REQUEST = -(1 << 63)


class Peers:
    """The ranks of one engine, connected by a CPU process group. At most `max_ended` requests end per step.

    Each rank samples by itself. If ranks draw different tokens, their batches still have one shape, and the difference is
    detected after the quantum (`dagrl.rl.generation`). But a token that ends a request on one rank only changes that rank's
    next batch, and its collectives would no longer match. So ranks compare whenever a request or the quantum ends. The
    exchange takes 0.1 ms or more, too much for every 5 ms step; steps without an ending skip it.
    """

    def __init__(self, group: ProcessGroup, max_ended: int, timeout_s: float) -> None:
        self._group = group
        self._max_ended = max_ended
        self._timeout_s = timeout_s

    def compare(self, step: int, ended: Collection[int]) -> None:
        """Raises RunError if a request ended in `step` on some ranks only. A collective over the ranks."""
        every = [set(row) - {_NO_REQUEST} for row in self._exchange(step, sorted(ended))]
        common = set.intersection(*every)
        for request in sorted(set.union(*every) - common):
            ranks = [rank for rank, own in enumerate(every) if request in own]
            raise disagreement(f"request {request} ended in engine step {step} on rank {ranks} of {len(every)} only")

    def _exchange(self, step: int, ended: list[int]) -> list[list[int]]:
        import torch

        ours = torch.tensor(ended + [_NO_REQUEST] * (self._max_ended - len(ended)), dtype=torch.int64)
        every = [torch.empty_like(ours) for _ in range(self._group.size())]
        try:
            self._group.allgather([every], [ours]).wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise disagreement(
                f"requests {ended} ended on rank {self._group.rank()} in engine step {step}, but not on all other ranks "
                f"within timeouts.collective_s = {self._timeout_s:g} s ({error})"
            ) from error
        return [row.tolist() for row in every]


@dataclass
class _Running:
    """State of a running request. `name` is vLLM's own for it.

    `starts` has `(version, tokens generated before it)` for each version that worked on it. `progress` is what the last
    quantum reported.
    """

    request: Request
    name: str
    progress: RequestProgress
    starts: list[tuple[int, int]]


class QuantumEngine:
    """Tracks requests around a vLLM engine. Of the weights it knows only the version."""

    def __init__(
        self,
        engine: LLMEngine,
        sampling: Callable[[Request], SamplingParams],
        peers: Peers | None = None,
        burst_steps: int = 1,
        recorder: ExpertRecorder | None = None,
        adapter: LoRARequest | None = None,
        media: EngineMedia | None = None,
    ) -> None:
        """`peers` are the engine's tensor-parallel ranks, if there are several. `burst_steps`: see `Bursts`. `recorder` is
        attached to its model. All requests run with `adapter`. `media` makes inputs of images.
        """
        self._recorder, self._adapter, self._media = recorder, adapter, media
        self._engine = engine
        self._bursts = Bursts(engine.engine_core.engine_core, burst_steps) if burst_steps > 1 else None
        self._peers = peers
        self._sampling = sampling
        self._vocabulary = int(engine.model_config.get_vocab_size())
        self._running: dict[str, _Running] = {}
        self._version = 0
        self._stepping = self._abandoned = False
        self._held: list[FinishedRequest] = []

    @property
    def interrupted(self) -> bool:
        """Whether a quantum is running or failed. After a failure ranks and scheduler disagree, and the engine is lost."""
        return self._stepping

    @property
    def unfinished(self) -> int:
        """Number of waiting and running requests."""
        return len(self._running)

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt plus continuation, in tokens."""
        return int(self._engine.model_config.max_model_len)

    def run(self, requests: Sequence[Request], engine_steps: int, seconds: float = math.inf) -> Generated:
        """Adds requests, runs up to `engine_steps` steps and returns what finished. With 0 steps it drains the engine.

        Once `seconds` of wall-clock time have passed, the quantum ends after the current step. Tensor-parallel ranks ignore
        `seconds`: their clocks differ, and a rank that stopped alone would leave the others waiting.
        Raises DataError for unusable requests, before any is added, and RunError after a failed quantum.
        """
        finished, steps = self._quantum(requests, engine_steps, seconds)
        if engine_steps == 0 or not self._running:
            self.drain()
        finished, self._held = self._held + finished, []
        return pack_generated(finished, self._progress(), steps)

    def warm_up(self, requests: Sequence[Request], engine_steps: int) -> Generated:
        """Runs a quantum and removes every trace of `requests`, whose ids are negative so that they cannot collide.

        Other requests continue. The next `run` returns what they finish.
        """
        finished, steps = self._quantum(requests, engine_steps)
        self.drain()
        finished, self._held = self._held + finished, []
        ours = [request for request in finished if request.request_id < 0]
        self._held = [request for request in finished if request.request_id >= 0]
        running = [progress for progress in self._progress() if progress.request_id < 0]
        self.abort(request.request_id for request in requests)
        self.reset_prefix_cache()
        return pack_generated(ours, running, steps)

    def _quantum(
        self, requests: Sequence[Request], engine_steps: int, seconds: float = math.inf
    ) -> tuple[list[FinishedRequest], int]:
        until = time.perf_counter() + seconds if self._peers is None else math.inf
        if self._stepping:
            raise RunError("an earlier quantum failed inside vLLM; restart the generation workers")
        self._check(requests)
        if self._media is not None:
            self._media.prepare(request.media for request in requests)
        self._stepping = True
        for request in requests:
            self._add(request)
        finished: list[FinishedRequest] = []
        steps = 0
        while self._running and steps < engine_steps:
            outputs, begun = self._step(engine_steps - steps)
            steps += begun
            finished += self._take(outputs, steps, last=steps == engine_steps)
            if self._running and not self._engine.has_unfinished_requests():
                raise RunError(f"vLLM has lost requests {sorted(self._running)[:5]}; restart the generation workers")
            if time.perf_counter() >= until:
                break
        self._stepping = False
        return finished, steps

    def _step(self, most: int) -> tuple[Sequence[RequestOutput], int]:
        """Returns the outputs of an engine step, and how many steps of the model it began: at most `most`."""
        if self._bursts is None:
            return self._engine.step(), 1
        self._bursts.limit = most
        return self._engine.step(), self._bursts.taken

    def drain(self) -> None:
        """Completes the steps in flight. The next quantum returns what finishes."""
        if not self._stepping:
            self._stepping = True
            self._held += self._take(features.drain(self._engine), 0)
            self._stepping = False

    def _take(self, outputs: Sequence[RequestOutput], steps: int, *, last: bool = False) -> list[FinishedRequest]:
        """Returns the requests that ended after `steps` steps of the quantum, and checks that all ranks agree."""
        if self._abandoned:
            raise RunError("the quantum was aborted inside an engine step; restart the generation workers")
        ended = [self._finish(output) for output in outputs if output.finished]
        if self._peers is not None and (ended or last):
            self._peers.compare(steps, [request.request_id for request in ended])
        return ended

    def abandon(self) -> None:
        """Makes the running quantum raise after its current step. Called from another thread."""
        self._abandoned = True

    def abort(self, request_ids: Iterable[int] | None = None) -> int:
        """Drops these requests (None: all) and their tokens. Returns how many there were."""
        self.drain()
        finished = {str(request.request_id): request for request in self._held}
        every = [*self._running, *finished]
        wanted = every if request_ids is None else {str(request_id) for request_id in request_ids}
        names = [name for name in every if name in wanted]
        self._engine.abort_request([name for name in names if name in self._running])
        self._held = [request for name, request in finished.items() if name not in wanted]
        self._forget(names)
        return len(names)

    def set_version(self, version: int, *, recompute: bool = False) -> None:
        """Attributes all further tokens to `version`. The engine must be drained.

        Running requests keep their KV cache, or recompute it with the new weights if `recompute`. Requests without a token
        are restarted.
        """
        lengths = {name: state.detokenizer.num_output_tokens() for name, state in self._states().items()}
        self._version = version
        for name, tokens in lengths.items():
            self._running[name].starts.append((version, tokens))
        self._restart_requests([name for name, tokens in lengths.items() if not tokens])
        self._forget_images()
        if recompute:
            if self._recorder is not None:
                self._recorder.forget_prefixes()
            self._engine.reset_prefix_cache(reset_running_requests=True)
        else:
            self.reset_prefix_cache()

    def _restart_requests(self, names: Sequence[str]) -> None:
        """Adds requests again under the current version's cache key.

        Otherwise requests that wait for a slot could match prefixes that older weights computed for the same prompt.
        """
        requests = [self._running[name].request for name in names]
        self._engine.abort_request(list(names))
        self._forget(names)
        for request in requests:
            self._add(request)

    def _forget(self, names: Sequence[str]) -> None:
        gone = [self._running.pop(name).name for name in names if name in self._running]
        if self._recorder is not None:
            self._recorder.drop(gone)

    def sleep(self, level: int) -> None:
        """Frees the KV cache and the weights. Level 1 moves the weights to host memory, level 2 drops them.

        Raises RunError while requests run, because their KV cache would be lost.
        """
        self.drain()
        if self._running:
            raise RunError(f"{self.unfinished} requests are running; let them finish or abort them before the engine sleeps")
        self._engine.sleep(level)

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Restores the memory that `tags` name, at the same addresses."""
        self._engine.wake_up(list(tags))

    def reset_prefix_cache(self) -> bool:
        """Frees cached prefixes. False while requests hold blocks; the version in the cache key then separates them."""
        if self._recorder is not None:
            self._recorder.forget_prefixes()
        self._forget_images()
        return bool(self._engine.reset_prefix_cache())

    def _forget_images(self) -> None:
        """Frees the outputs of the vision tower, which vLLM keeps by the ids of images, whatever the weights."""
        if self._media is not None:
            self._engine.reset_encoder_cache()

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            name, length = str(request.request_id), len(request.prompt)
            if not 0 < length < self.max_model_len:
                raise DataError(
                    f"the prompt of request {name} has {length} tokens; vLLM takes 1 to {self.max_model_len - 1} here. "
                    "Shorten it, or raise policy.max_total_sequence_length or policy.generation.vllm_cfg.max_model_len"
                )
            if min(request.prompt) < 0 or max(request.prompt) >= self._vocabulary:
                raise DataError(
                    f"the prompt of request {name} has tokens from {min(request.prompt)} to {max(request.prompt)}; the "
                    f"model has 0 to {self._vocabulary - 1}. Tokenize the data with the model's own tokenizer"
                )

    def _add(self, request: Request) -> None:
        name = str(request.request_id)
        # The version is part of the cache key, so a request never matches a prefix computed by older weights.
        salt = f"version {self._version}"
        prompt: Any = {"prompt_token_ids": list(request.prompt), "cache_salt": salt}
        if self._media is not None and any(request.media):
            prompt = self._media.input(request.prompt, request.media, salt)
        own = str(self._engine.add_request(name, prompt, self._sampling(request), lora_request=self._adapter))
        state: Any = next(reversed(self._engine.output_processor.request_states.values()))
        state.logprobs_processor = SampledLogprobs()
        self._running[name] = _Running(request, own, RequestProgress(request.request_id), [(self._version, 0)])
        if self._recorder is not None:
            self._recorder.follow(own, request.prompt, self._version)

    def _finish(self, output: RequestOutput) -> FinishedRequest:
        running = self._running.pop(output.request_id)
        completion = output.outputs[0]
        tokens = array("q", completion.token_ids)
        return FinishedRequest(
            request_id=running.request.request_id,
            tokens=tokens,
            logprobs=np.concatenate(cast(Any, completion.logprobs) or [()]),
            versions=_token_versions(running.starts, len(tokens)),
            finish_reason=str(completion.finish_reason),
            experts=None if self._recorder is None else self._recorder.take(running.name, tokens),
        )

    def _states(self) -> dict[str, Any]:
        """Returns vLLM's state of each request, by our name for it."""
        return {state.external_req_id: state for state in self._engine.output_processor.request_states.values()}

    def _progress(self) -> list[RequestProgress]:
        """Updates and returns the progress of each request. Called after every quantum, so it reads only the new tokens."""
        states = self._states()
        for name, running in self._running.items():
            if name in states:
                before, tokens = running.progress, states[name].detokenizer.output_token_ids
                new = tokens[before.tokens :]
                running.progress = RequestProgress(before.request_id, len(tokens), checksum(new, before.checksum))
        return [running.progress for running in self._running.values()]


class SampledLogprobs:
    """The log-probabilities of a request's tokens, kept as vLLM's sampler made them.

    Stands in for vLLM's processor, which makes a dictionary of objects for every token. It has what vLLM reads of that.
    """

    prompt_logprobs = prompt_token_id_logprobs = cumulative_logprob = None

    def __init__(self) -> None:
        self.logprobs: list[np.ndarray[Any, Any]] = []

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Adds those of the tokens that a step made. The sampled token is in the first column."""
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs.logprobs[:, 0])


def _token_versions(starts: Sequence[tuple[int, int]], length: int) -> IntArray:
    """Returns the version of each of `length` tokens. Example: `_token_versions([(0, 0), (1, 2)], 3)` is `[0, 0, 1]`."""
    versions = np.empty(length, np.int64)
    for version, begin in starts:
        versions[begin:] = version
    return versions
