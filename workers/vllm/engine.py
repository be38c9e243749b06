"""QuantumEngine: one vLLM engine rank that takes requests and runs a bounded number of steps.

vLLM prepares a step while the one before it computes (asynchronous scheduling, where it can), from quantum to quantum: the
step that a quantum started last gives out its tokens in the next one, so that the GPU has work meanwhile. Before anything
else is done to the engine it comes to rest; no step runs on weights that a refit is writing. A request keeps its KV cache,
and the policy version of each of its tokens is known, because versions change only at rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagrl.config import GenerationConfig
from dagrl.errors import DataError, RunError
from dagrl.generation import FinishedRequest, Generated, Progress, checksum, pack_generated
from workers.vllm import features

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput

    from workers.vllm.peers import Peers


@dataclass(frozen=True)
class Request:
    """A prompt to continue: `max_new_tokens` at most; `seed` draws its tokens, `greedy` takes the likeliest instead."""

    request_id: int
    prompt: Sequence[int]
    seed: int
    max_new_tokens: int
    greedy: bool


@dataclass
class _Running:
    """What `request` has come to.

    `starts` are `(version, tokens made before it)` of each version that has worked on it, `progress` what the last quantum
    said of it.
    """

    request: Request
    progress: Progress
    starts: list[tuple[int, int]]


class QuantumEngine:
    """Bookkeeping of requests around a vLLM engine; knows nothing of weights but their version."""

    def __init__(
        self, engine: LLMEngine, config: GenerationConfig, eos_token_ids: Iterable[int], peers: Peers | None = None
    ) -> None:
        """`peers` are the tensor-parallel ranks of this engine, where there are several."""
        self._engine = engine
        self._peers = peers
        self._config = config
        self._vocabulary = int(engine.model_config.get_vocab_size())
        self._stop_token_ids = sorted({*config.stop_token_ids, *eos_token_ids})
        self._running: dict[str, _Running] = {}
        self._version = 0
        self._stepping = self._given_up = False
        self._held: list[FinishedRequest] = []

    @property
    def interrupted(self) -> bool:
        """Whether a quantum is under way, or broke off: then ranks and scheduler no longer agree, and the engine is lost."""
        return self._stepping

    @property
    def unfinished(self) -> int:
        """Requests that are waiting or running."""
        return len(self._running)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus continuation, in tokens."""
        return int(self._engine.model_config.max_model_len)

    def run(self, requests: Sequence[Request], engine_steps: int, seconds: float = math.inf) -> Generated:
        """Add requests, run up to `engine_steps` steps, return what finished; with 0 steps the engine comes to rest.

        After `seconds` (wall clock, from the call on) the quantum ends with the step that it is in. Ranks that run in step
        make all steps, as each has a clock of its own and one that ended alone would leave the others waiting.
        Raises DataError for unusable requests, before any of them is added, and RunError after a quantum that broke off.
        """
        finished, steps = self._quantum(requests, engine_steps, seconds)
        if engine_steps == 0 or not self._running:
            self.rest()
        finished, self._held = self._held + finished, []
        return pack_generated(finished, self._progress(), steps)

    def rehearse(self, requests: Sequence[Request], engine_steps: int) -> Generated:
        """A quantum that leaves nothing of `requests`, whose ids are negative so that they meet no other's.

        Requests that were running go on; what they finish is returned by the next `run`.
        """
        finished, steps = self._quantum(requests, engine_steps)
        self.rest()
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
            raise RunError("an earlier quantum broke off inside vLLM; restart the generation workers")
        self._check(requests)
        self._stepping = True
        for request in requests:
            self._add(request)
        finished: list[FinishedRequest] = []
        steps = 0
        while self._running and steps < engine_steps:
            steps += 1
            finished += self._take(self._engine.step(), steps, last=steps == engine_steps)
            if self._running and not self._engine.has_unfinished_requests():
                raise RunError(f"vLLM knows no more of requests {sorted(self._running)[:5]}; restart the generation workers")
            if time.perf_counter() >= until:
                break
        self._stepping = False
        return finished, steps

    def rest(self) -> None:
        """Let the step in flight end, as before every change of the engine; what finishes comes with the next quantum."""
        if not self._stepping:
            self._stepping = True
            self._held += self._take(features.come_to_rest(self._engine), 0)
            self._stepping = False

    def _take(self, outputs: Sequence[RequestOutput], steps: int, *, last: bool = False) -> list[FinishedRequest]:
        """The requests that ended, by what vLLM gave out after `steps` steps of the quantum; all ranks agree on them."""
        if self._given_up:
            raise RunError("the quantum was aborted inside an engine step; restart the generation workers")
        ended = [self._finish(output) for output in outputs if output.finished]
        if self._peers is not None and (ended or last):
            self._peers.compare(steps, [request.request_id for request in ended])
        return ended

    def give_up(self) -> None:
        """From another thread: let the quantum that is under way end in an error, whatever its steps return."""
        self._given_up = True

    def abort(self, request_ids: Iterable[int] | None = None) -> int:
        """Drop these requests (None: all) with what they have made so far; returns how many were there."""
        self.rest()
        held = {str(request.request_id): request for request in self._held}
        there = [*self._running, *held]
        wanted = there if request_ids is None else {str(request_id) for request_id in request_ids}
        names = [name for name in there if name in wanted]
        self._engine.abort_request([name for name in names if name in self._running])
        self._held = [request for name, request in held.items() if name not in wanted]
        for name in names:
            self._running.pop(name, None)
        return len(names)

    def change_version(self, version: int, *, recompute: bool = False) -> None:
        """From now on tokens are made by `version`; the engine is at rest.

        Running requests go on from the KV cache that they have, or with `recompute` have it made anew by the new weights.
        Those without a token yet begin anew.
        """
        made = dict(self._tokens_made())
        self._version = version
        for name, tokens in made.items():
            self._running[name].starts.append((version, tokens))
        self._begin_anew([name for name, tokens in made.items() if not tokens])
        if recompute:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        else:
            self.reset_prefix_cache()

    def _begin_anew(self, names: Sequence[str]) -> None:
        """Add requests again, under the cache key of the version that is now: those that wait for a slot would otherwise
        find prefixes that older weights made for others of their prompt."""
        requests = [self._running.pop(name).request for name in names]
        self._engine.abort_request(list(names))
        for request in requests:
            self._add(request)

    def sleep(self, level: int) -> None:
        """Give up the KV cache and the weights (level 1: they go to host memory; 2: they are dropped).

        Raises RunError while requests run, whose KV cache would be lost.
        """
        self.rest()
        if self._running:
            raise RunError(f"{self.unfinished} requests are running; let them finish or abort them before the engine sleeps")
        self._engine.sleep(level)

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Take back what `tags` name, at the same addresses."""
        self._engine.wake_up(list(tags))

    def snapshot(self) -> list[FinishedRequest]:
        """What the requests that are not finished have made so far; they go on. The finish reason is `unfinished`."""
        self.rest()
        states = self._states()
        return [self._partial(running, states.get(name)) for name, running in self._running.items()]

    def reset_prefix_cache(self) -> bool:
        """Free cached prefixes; False while running requests hold blocks (then the version in the cache key parts them)."""
        return bool(self._engine.reset_prefix_cache())

    def _check(self, requests: Sequence[Request]) -> None:
        seen: set[str] = set()
        for request in requests:
            name, length = str(request.request_id), len(request.prompt)
            if name in self._running or name in seen:
                raise DataError(f"request {name} is already running; give every request an id of its own")
            if not 0 < length < self.max_model_len:
                raise DataError(
                    f"the prompt of request {name} has {length} tokens; vLLM takes 1 to {self.max_model_len - 1} here. "
                    "Shorten it, or raise policy.max_total_sequence_length or policy.generation.vllm_cfg.max_model_len"
                )
            if min(request.prompt) < 0 or max(request.prompt) >= self._vocabulary:
                raise DataError(
                    f"the prompt of request {name} has tokens from {min(request.prompt)} to {max(request.prompt)}; the "
                    f"model has 0 to {self._vocabulary - 1}. Make the data with the model's own tokenizer"
                )
            if request.max_new_tokens < 1 or request.seed < 0:
                raise DataError(
                    f"request {name} asks for {request.max_new_tokens} new tokens with seed {request.seed}; "
                    "at least one token and a seed that is not negative are expected"
                )
            seen.add(name)

    def _add(self, request: Request) -> None:
        name = str(request.request_id)
        # The version is part of the cache key: a prefix computed by older weights is never matched by a newer request.
        prompt: Any = {"prompt_token_ids": list(request.prompt), "cache_salt": f"version {self._version}"}
        self._engine.add_request(name, prompt, self._sampling(request))
        self._running[name] = _Running(request, Progress(request.request_id), [(self._version, 0)])

    def _sampling(self, request: Request) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        config = self._config
        forced = config.forced_lengths is not None
        return SamplingParams(
            temperature=0.0 if request.greedy else config.temperature,
            top_p=config.top_p,
            top_k=config.top_k or 0,
            seed=request.seed,
            max_tokens=min(request.max_new_tokens, self.max_model_len - len(request.prompt)),
            stop=[] if forced else list(config.stop_strings),
            stop_token_ids=[] if forced else self._stop_token_ids,
            ignore_eos=forced,
            detokenize=bool(config.stop_strings) and not forced,
            logprobs=0,  # of the sampled token alone
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _finish(self, output: RequestOutput) -> FinishedRequest:
        running = self._running.pop(output.request_id)
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        return FinishedRequest(
            request_id=running.request.request_id,
            tokens=tokens,
            logprobs=list(_sampled_logprobs(completion)),
            versions=_token_versions(running.starts, len(tokens)),
            finish_reason=str(completion.finish_reason),
        )

    def _partial(self, running: _Running, state: Any) -> FinishedRequest:
        tokens = [] if state is None else [int(token) for token in state.detokenizer.output_token_ids]
        table = state.logprobs_processor.logprobs if tokens else []
        logprobs = [float(entry[token].logprob) for token, entry in zip(tokens, table, strict=True)]
        versions = _token_versions(running.starts, len(tokens))
        return FinishedRequest(running.request.request_id, tokens, logprobs, versions, "unfinished")

    def _states(self) -> dict[str, Any]:
        """What vLLM knows of each request, by our name for it."""
        return {state.external_req_id: state for state in self._engine.output_processor.request_states.values()}

    def _tokens_made(self) -> Iterator[tuple[str, int]]:
        for name, state in self._states().items():
            yield name, state.detokenizer.num_output_tokens()

    def _progress(self) -> list[Progress]:
        """How far each request is; a look at the tokens made since the last one, as this is asked after every quantum."""
        states = self._states()
        for name, running in self._running.items():
            if name in states:
                before, tokens = running.progress, states[name].detokenizer.output_token_ids
                new = tokens[before.tokens :]
                running.progress = Progress(before.request_id, len(tokens), checksum(new, before.checksum))
        return [running.progress for running in self._running.values()]


def _sampled_logprobs(completion: CompletionOutput) -> Iterator[float]:
    assert completion.logprobs is not None, "logprobs were asked for"
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        yield position[token].logprob


def _token_versions(starts: Sequence[tuple[int, int]], length: int) -> list[int]:
    """Version of each of `length` tokens. Example: `_token_versions([(0, 0), (1, 2)], 3)` is `[0, 0, 1]`."""
    versions: list[int] = []
    for (version, begin), end in zip(starts, [made for _, made in starts[1:]] + [length], strict=True):
        versions.extend([version] * (end - begin))
    return versions
