"""An agent on the endpoint that solves a story, and has the policy try once more if the answer is wrong."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from dagrl import Endpoint
from recipes.gemma3_270m.tasks import final_answer

CLIENT = AsyncOpenAI(base_url="http://of.the.episode", api_key="of the episode")


async def solves(example: dict[str, Any], endpoint: Endpoint) -> dict[str, float]:
    """Asks for a solution, and for another in the same conversation if the answer is wrong."""
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages: list[Any] = list(example["messages"])
    for tries in range(2):
        answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
        text = answer.choices[0].message.content or ""
        if final_answer([example["prompt"]], [text], [example["reference"]])[0]["right"]:
            return {"right": 1.0, "at_once": float(tries == 0)}
        messages += [{"role": "assistant", "content": text}, example["messages"][-1]]
    return {"right": 0.0, "at_once": 0.0}
