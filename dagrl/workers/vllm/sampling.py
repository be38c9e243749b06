"""vLLM's sampling parameters for one request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagrl.config import GenerationConfig
from dagrl.workers.vllm.engine import Request

if TYPE_CHECKING:
    from vllm import SamplingParams


def sampling_params(
    config: GenerationConfig, stop_token_ids: Sequence[int], max_model_len: int, request: Request
) -> SamplingParams:
    """Returns the parameters. `stop_token_ids` end a request, unless the configuration forces its length."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    options, stops = request.options, [*config.stop_strings, *request.options.stop]
    temperature = config.temperature if options.temperature is None else options.temperature
    forced = config.forced_lengths is not None
    constraint = StructuredOutputsParams(**json.loads(options.constraint)) if options.constraint and not forced else None
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
        structured_outputs=constraint,
    )


def warmup_params(config: GenerationConfig) -> SamplingParams:
    """Returns the parameters with which an engine compiles its sampling kernels. Greedy requests need no others."""
    length = config.max_new_tokens
    return sampling_params(config, (), length, Request(0, (), seed=0, max_new_tokens=length, greedy=False))
