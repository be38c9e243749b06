"""vLLM's sampling parameters for one request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagrl.config import GenerationConfig
from dagrl.workers.vllm.engine import Request

if TYPE_CHECKING:
    from vllm import SamplingParams


@dataclass(frozen=True)
class Sampling:
    """How requests are sampled. `stop_token_ids` end a request, unless the configuration forces its length."""

    config: GenerationConfig
    stop_token_ids: tuple[int, ...]
    max_model_len: int

    @staticmethod
    def of(config: GenerationConfig, eos_token_ids: Iterable[int], max_model_len: int) -> Sampling:
        """Combines the configuration's stop tokens with the model's."""
        return Sampling(config, tuple(sorted({*config.stop_token_ids, *eos_token_ids})), max_model_len)

    def __call__(self, request: Request) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        config, options = self.config, request.options
        stops = [*config.stop_strings, *options.stop]
        temperature = config.temperature if options.temperature is None else options.temperature
        forced = config.forced_lengths is not None
        constraint = StructuredOutputsParams(**json.loads(options.constraint)) if options.constraint and not forced else None
        return SamplingParams(
            temperature=0.0 if request.greedy else temperature,
            top_p=config.top_p if options.top_p is None else options.top_p,
            top_k=config.top_k or 0,
            seed=request.seed,
            max_tokens=min(request.max_new_tokens, self.max_model_len - len(request.prompt)),
            stop=[] if forced else stops,
            stop_token_ids=[] if forced else list(self.stop_token_ids),
            ignore_eos=forced,
            detokenize=bool(stops) and not forced,
            logprobs=0,  # of the sampled token only
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=constraint,
        )
