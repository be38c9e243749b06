"""An agent that learns additions from its mistakes. With grpo_agent.yaml, from its directory:

dagrl train grpo_agent.yaml environment.agent=adding_agent:adds
"""

from typing import Any

from openai import AsyncOpenAI

from dagrl import Endpoint

CLIENT = AsyncOpenAI(base_url="http://of.the.episode", api_key="of the episode")  # a new one for each takes 30 ms


async def adds(example: dict[str, Any], endpoint: Endpoint) -> dict[str, float]:
    """Asks for a sum, and once more in the same conversation if the answer is wrong."""
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages: list[Any] = list(example["messages"])  # `prompt` is their text, rendered by the chat template
    for tries in range(2):
        answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
        text = answer.choices[0].message.content or ""
        if text == example["reference"]:
            return {"right": 1.0, "at_once": float(tries == 0)}
        messages += [{"role": "assistant", "content": text}, example["messages"][-1]]
    return {"right": 0.0, "at_once": 0.0}
