"""Environments behind an OpenEnv server (Meta, Hugging Face): a session per sequence, over its WebSocket.

    data: {task: "dagrl.rl.openenv:episodes", task_args: {count: 1000}}
    environment:
      function: dagrl.rl.openenv:OpenEnvironment
      args: {url: "http://localhost:8000"}
      max_turns: 10
    reward: {function: null}

The first observation is the prompt, and later ones are replies. A turn is the action: a JSON object, alone or in a fenced
block, or, if the server's schema has one field to fill, the text of that field. An action that is not valid is answered with
the reason. `args` may name functions of yours instead: `observe` (of an observation: its text or messages) and `act` (of a
turn's text: the action).
"""

import importlib
import json
import re
import urllib.request
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from dagrl.config import Json
from dagrl.data import Example, Splits
from dagrl.errors import ConfigError
from dagrl.imports import load_callable
from dagrl.rl.functions.episodes import Step

Fields = Mapping[str, Json]
Observe = Callable[[Fields], "str | list[dict[str, Any]]"]
Act = Callable[[str], Fields]

CLIENT = "openenv.core.generic_client"

OUTSIDE = ("done", "reward", "metadata")  # fields of every observation and action that are not part of the conversation

FENCED = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)
INVALID = "VALIDATION_ERROR"  # OpenEnv's code for an action that does not fit the schema

SCHEMA_S = 10.0  # deadline of reading the schema. A step has `environment.timeout_s`


def episodes(count: int = 1000, held_out: int = 64, seed: int = 0, reset: Fields | None = None) -> Splits:
    """Returns `count` episodes to train on and `held_out` for validation, each with a `seed` of its own for `reset`.

    All sequences of a group have the same seed. `reset` has further arguments of the server's `reset`.
    """
    if count < 1 or held_out < 0:
        raise ValueError(f"count is {count} and held_out {held_out}; expected: at least 1 and 0")
    examples = [
        Example(f"episode {number}", "", source=f"episode {number}", columns={"reset": {"seed": number, **(reset or {})}})
        for number in range(seed, seed + count + held_out)
    ]
    return Splits(tuple(examples[:count]), tuple(examples[:count]), tuple(examples[count:]))


class OpenEnvironment:
    """A session of the server at `url`."""

    requires = ("openenv",)

    def __init__(self, url: str, observe: str | None = None, act: str | None = None) -> None:
        """`observe` and `act` are import paths. Raises ConfigError if one is wrong."""
        self._url = url
        self._observe: Observe = load_callable(observe, "environment.args.observe") if observe else observation_text
        self._act: Act | None = load_callable(act, "environment.args.act") if act else None
        self._client = importlib.import_module(CLIENT).GenericEnvClient(base_url=url)

    @staticmethod
    def prepare(url: str, observe: str | None = None, act: str | None = None) -> None:
        """Imports the client and reads the schema when a process starts: a server that does not run ends the run there."""
        importlib.import_module(CLIENT)
        if act is None:
            action_schema(url)

    async def reset(self, example: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Opens the session and returns the first observation."""
        await self._client.connect()
        if self._act is None:
            self._act = action_reader(action_schema(self._url))  # `prepare` has read it
        result = await self._client.reset(**example["columns"].get("reset", {"seed": example["group_seed"]}))
        if result.done:
            raise ValueError(f"the episode ended before the first turn: {result.observation}")
        return self._observe(result.observation)

    async def step(self, completion: str) -> Step:
        """Takes the action of a turn. Returns the observation, or None after the last, and the reward."""
        assert self._act is not None
        try:
            result = await self._client.step(dict(self._act(completion)))
        except (ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and INVALID not in str(error):
                raise
            return Step(f"error: {error}\n")
        reward = None if result.reward is None else float(result.reward)
        return Step(None if result.done else self._observe(result.observation), reward)

    async def close(self) -> None:
        """Ends the session."""
        await self._client.close()


def observation_text(observation: Fields) -> str:
    """Returns an observation as text: its only field if that is text, or else its fields as JSON."""
    shown = {name: value for name, value in observation.items() if name not in OUTSIDE}
    only = next(iter(shown.values())) if len(shown) == 1 else None
    return only if isinstance(only, str) else json.dumps(shown, ensure_ascii=False)


@cache
def action_schema(url: str) -> dict[str, Any]:
    """Returns the JSON schema of the server's actions. Raises ConfigError if it cannot be read."""
    where = f"{url.rstrip('/').replace('ws://', 'http://', 1).replace('wss://', 'https://', 1)}/schema"
    if not where.startswith(("http://", "https://")):
        raise ConfigError(f"environment.args.url is {url!r}; expected: http://HOST:PORT or https://HOST")
    try:
        with urllib.request.urlopen(where, timeout=SCHEMA_S) as answer:  # noqa: S310  # http or https
            schema: dict[str, Any] = json.load(answer)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"environment.args.url: {where} does not answer with the schema of an OpenEnv server ({error}); check that the "
            "server runs, or name a function that makes actions in environment.args.act"
        ) from error
    return schema


def action_reader(schema: Mapping[str, Any]) -> Act:
    """Returns the function that makes an action of a turn. It raises ValueError for a text that is none."""
    fields = [name for name in schema.get("properties", {}) if name not in OUTSIDE]
    wanted = [name for name in schema.get("required", ()) if name in fields] or fields

    def act(text: str) -> Fields:
        block = FENCED.search(text)
        written = (block[1] if block else text).strip()
        try:
            action = json.loads(written)
        except ValueError:
            action = written
        if isinstance(action, dict):
            return action
        if len(wanted) != 1:
            raise ValueError(f"expected a JSON object with {', '.join(wanted) or 'the fields of an action'}")
        is_text = schema["properties"][wanted[0]].get("type") == "string"
        return {wanted[0]: written if is_text else action}

    return act
