"""vLLM's side of `bench generate`: `LLM.generate`, or the async engine, for the requests of a GRPO step."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dagrl.bench.harness import answer
from dagrl.bench.workloads import GROUP, RolloutCase


def largest(cases: Sequence[RolloutCase]) -> RolloutCase:
    """Returns the case for which an engine is built that takes all of them."""
    return replace(max(cases, key=lambda case: case.sequences), kv_bytes=max(case.kv_bytes for case in cases))


def engine_arguments(case: RolloutCase, model: str) -> dict[str, Any]:
    """Returns the engine's arguments; those of dagrl's side."""
    import torch

    arguments: dict[str, Any] = {
        "model": model,
        "dtype": case.precision,
        "max_model_len": case.prompt + case.completion + 8,
        "max_num_seqs": case.slots,
        "kv_cache_memory_bytes": case.kv_bytes,
        "gpu_memory_utilization": 0.1,  # of no effect with a given cache, but this much must be free
        "enforce_eager": case.tiny,
        "enable_prefix_caching": True,
    }
    if case.shape.images:
        arguments["limit_mm_per_prompt"] = {"image": 1, "video": 0}
        arguments |= {} if torch.cuda.is_available() else {"skip_mm_profiling": True}
    return arguments | ({"attention_config": {"backend": "FLASH_ATTN"}} if torch.cuda.is_available() else {})


def requests(case: RolloutCase, draw: random.Random) -> list[list[int]]:
    """Returns the token ids of the prompts of a step, each as often as its group is large."""
    prompts = [[draw.randrange(4, 14) for _ in range(case.prompt)] for _ in range(case.sequences // GROUP)]
    return [prompt for prompt in prompts for _ in range(GROUP)]


def sampling(case: RolloutCase) -> Any:
    """Returns sampling parameters: a fixed length, and the log-probability of each sampled token."""
    from vllm import SamplingParams

    return SamplingParams(temperature=1.0, max_tokens=case.completion, ignore_eos=True, logprobs=0)


def together(cases: Sequence[RolloutCase], model: str, steps: int) -> dict[str, list[float]]:
    """Returns the seconds of `LLM.generate` for each step of every case."""
    from vllm import LLM

    draw = random.Random(1)  # noqa: S311  # not cryptography
    engine = LLM(**engine_arguments(largest(cases), model))
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    for case in cases:
        for _ in range(1 + steps):
            prompts = [{"prompt_token_ids": tokens} for tokens in requests(case, draw)]
            start = time.perf_counter()
            engine.generate(prompts, sampling(case), use_tqdm=False)
            found[case.name].append(time.perf_counter() - start)
    return found


async def serving(cases: Sequence[RolloutCase], model: str, steps: int) -> dict[str, list[float]]:
    """Returns the same of the async engine, with all requests of a step at once."""
    from vllm import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    draw, number = random.Random(1), 0  # noqa: S311  # not cryptography
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(largest(cases), model)))
    found: dict[str, list[float]] = {case.name: [] for case in cases}

    async def one(tokens: list[int], parameters: Any, name: str) -> None:
        async for _ in engine.generate({"prompt_token_ids": tokens}, parameters, name):
            pass

    for case in cases:
        parameters = sampling(case)
        parameters.output_kind = RequestOutputKind.FINAL_ONLY
        for _ in range(1 + steps):
            prompts = requests(case, draw)
            start = time.perf_counter()
            await asyncio.gather(*(one(tokens, parameters, str(number + row)) for row, tokens in enumerate(prompts)))
            found[case.name].append(time.perf_counter() - start)
            number += len(prompts)
    engine.shutdown()
    return found


def work(cases: list[dict[str, Any]], model: str, steps: int, asynchronous: bool) -> dict[str, list[float]]:
    """Returns the seconds of each step of every case."""
    every = [RolloutCase(**case) for case in cases]
    return asyncio.run(serving(every, model, steps)) if asynchronous else together(every, model, steps)


if __name__ == "__main__":
    answer(work)
