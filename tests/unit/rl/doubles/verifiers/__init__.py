"""A double of verifiers: one environment that adds up what it is told, over three turns."""

from __future__ import annotations

from typing import Any

from verifiers.clients import Client

__version__ = "0.3.1"


class Environment:
    requires_group_rollouts = False
    tool_defs: list[Any] | None = None
    eval_dataset = eval_dataset_source = None

    def get_dataset(self, n: int = -1, seed: int | None = None) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": f"add {n}"}], "answer": str(n), "example_id": n} for n in range(4)]

    async def run_rollout(
        self,
        input: dict[str, Any],
        client: Client,
        model: str,
        sampling_args: dict[str, Any],
        max_retries: int = 0,
        state_columns: list[str] | None = None,
        env_client: Any = None,
    ) -> dict[str, Any]:
        messages, total = [dict(message) for message in input["prompt"]], int(input["answer"])
        for _ in range(2):
            response = await client.get_response(prompt=messages, model=model, sampling_args=sampling_args, tools=None)
            text = response.message.content
            if text == "fail":
                return {"reward": 0.0, "error": {"error_chain_repr": "Error('told to fail')"}}
            total += int(text)
            reply = {"role": "user", "content": f"it is {total}"}
            messages = (
                [{"role": "user", "content": "rewritten"}] if text == "9" else [*messages, response.message.said(), reply]
            )
        return {"reward": float(total), "error": None, "stop_condition": "turns"}


def load_environment(env_id: str, **env_args: Any) -> Environment:
    if env_id != "adder":
        raise ValueError(f"Could not import '{env_id}' environment.")
    return Environment()
