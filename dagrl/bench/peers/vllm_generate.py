"""vLLM's side of generation in `bench peers`: `LLM.generate`, or the async engine, for the requests of a GRPO step."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from dagrl.bench.peers.case import GROUP, PeerCase
from dagrl.bench.turns import Told, serve, take_turns


def engine_arguments(case: PeerCase, model: str) -> dict[str, Any]:
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
    return arguments | ({"attention_config": {"backend": "FLASH_ATTN"}} if torch.cuda.is_available() else {})


def requests(case: PeerCase, draw: random.Random) -> list[list[int]]:
    """Returns the token ids of the prompts of a step, each as often as its group is large."""
    prompts = [[draw.randrange(4, 14) for _ in range(case.prompt)] for _ in range(case.sequences // GROUP)]
    return [prompt for prompt in prompts for _ in range(GROUP)]


def sampling(case: PeerCase) -> Any:
    """Returns sampling parameters: a fixed length, and the log-probability of each sampled token."""
    from vllm import SamplingParams

    return SamplingParams(temperature=1.0, max_tokens=case.completion, ignore_eos=True, logprobs=0)


def together(told: Told) -> None:
    """Takes turns of `LLM.generate`."""
    from vllm import LLM

    draw = random.Random(1)  # noqa: S311  # not cryptography
    engine = LLM(**engine_arguments(told.order.largest, str(told.order.model)))

    def take(case: PeerCase, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            prompts = [{"prompt_token_ids": tokens} for tokens in requests(case, draw)]
            start = time.perf_counter()
            engine.generate(prompts, sampling(case), use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        return seconds

    take_turns(told, take)


async def one(engine: Any, tokens: list[int], parameters: Any, name: str) -> None:
    """Generates one sequence to its end."""
    async for _ in engine.generate({"prompt_token_ids": tokens}, parameters, name):
        pass


def asynchronous(told: Told) -> None:
    """Takes turns of the async engine, all requests at once."""
    from vllm import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    draw = random.Random(1)  # noqa: S311  # not cryptography

    async def serving() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(told.order.largest, str(told.order.model))))
        told.answer()
        number = 0
        while (turn := await asyncio.to_thread(told.turn)) is not None:
            (case, steps), seconds = turn, []
            parameters = sampling(case)
            parameters.output_kind = RequestOutputKind.FINAL_ONLY
            for _ in range(steps):
                prompts = requests(case, draw)
                start = time.perf_counter()
                names = [str(number + row) for row in range(len(prompts))]
                number += len(prompts)
                await asyncio.gather(
                    *(one(engine, prompt, parameters, name) for prompt, name in zip(prompts, names, strict=True))
                )
                seconds.append(time.perf_counter() - start)
            told.answer(seconds)
        engine.shutdown()

    asyncio.run(serving())


def work(told: Told) -> None:
    """Takes turns of the engine that the variant names."""
    (asynchronous if told.order.variant == "async" else together)(told)


if __name__ == "__main__":
    serve(work)
