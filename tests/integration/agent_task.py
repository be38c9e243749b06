"""Agents of a test run. Each request and its answer is noted in a file."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from dagrl.rl.agents import Endpoint

NOTES = "DAGRL_TEST_NOTES"
PAUSE_S = 0.3


async def adds_twice(example: dict[str, Any], endpoint: Endpoint) -> dict[str, float]:
    """Asks, goes on twice in the same conversation (every other episode as a stream, after a pause), and asks something
    else.
    """
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    slow = example["seed"] % 2 == 1
    messages = [{"role": "user", "content": example["prompt"]}]
    noted = [await _ask(client, endpoint, messages)]
    for _ in range(2):
        await asyncio.sleep(PAUSE_S * slow)
        messages += [{"role": "assistant", "content": noted[-1]["text"]}, {"role": "user", "content": "1+1"}]
        noted.append(await _ask(client, endpoint, messages, stream=slow))
    noted.append(await _ask(client, endpoint, [{"role": "user", "content": "2+2"}], max_tokens=3, stop=["5", "66"]))
    _note({"seed": example["seed"], "answers": noted})
    return {"sevens": float(sum(item["text"].count("7") for item in noted)), "asked": 1.0}


def _note(content: dict[str, Any]) -> None:
    with Path(os.environ[NOTES]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")


async def _ask(client: Any, endpoint: Endpoint, messages: Any, **options: Any) -> dict[str, Any]:
    wanted = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    answer = await client.chat.completions.create(model=endpoint.model, messages=messages, **wanted, **options)
    if not options.get("stream"):
        return _noted(answer, answer.choices[0].message.content)
    first, *_ = [chunk async for chunk in answer]
    return _noted(first, first.choices[0].delta.content)


def _noted(answer: Any, text: str) -> dict[str, Any]:
    (choice,) = answer.choices
    return {
        "text": text,
        "prompt": answer.prompt_token_ids,
        "tokens": choice.token_ids,
        "logprobs": [item.logprob for item in choice.logprobs.content],
        "versions": answer.policy_versions,
    }
