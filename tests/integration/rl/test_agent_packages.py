"""Unmodified agent packages against the endpoint: their conversations are rows of exactly the sampled tokens."""

import asyncio
from collections.abc import Iterator

import pytest

from dagrl.rl.agents.episode import Limits
from tests.unit.rl.test_agent_endpoint import END, STOP, Served
from tests.unit.rl.test_environment import called

pytest.importorskip("vllm")

CALL = called({"name": "add", "arguments": {"a": 2, "b": 3}})


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    served.episode._limits = Limits(20_000, 2000, 8, 1.0, 1.0)
    yield served
    served.generation.close()
    served.server.stop(STOP)


def check_row(served: Served, said: list[str], heard: str) -> None:
    """Checks that there is one conversation with these turns in the loss, and the tool's answer in its context."""
    (row,) = served.rows()
    pieces: list[tuple[bool, str]] = []
    for token, in_loss in zip(row.tokens, row.sampled, strict=True):
        text = served.tokenizer.decode([token])
        if pieces and pieces[-1][0] == in_loss:
            pieces[-1] = (in_loss, pieces[-1][1] + text)
        else:
            pieces.append((in_loss, text))
    assert [text for in_loss, text in pieces if in_loss] == [turn + END for turn in said]
    assert heard in next(text for in_loss, text in pieces if not in_loss)
    turns = served.generation.turns
    assert len(turns) == len(said) and [*row.prompt, *row.tokens][: len(turns[-1].prompt)] == turns[-1].prompt


def test_openai_agents(served: Served) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    added = []

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        added.append((a, b))
        return a + b

    client = openai.AsyncOpenAI(base_url=served.server.base_url, api_key=served.episode.api_key, max_retries=0)
    model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = agents.Agent(name="adder", instructions="Use the tool.", tools=[agents.function_tool(add)], model=model)
    served.generation.texts += [CALL, "It is 5."]
    result = asyncio.run(agents.Runner.run(agent, "2+3"))
    assert result.final_output == "It is 5." and added == [(2, 3)]
    check_row(served, [CALL, "It is 5."], "<|im_start|>tool\n5")


def test_smolagents_calls_tools(served: Served) -> None:
    """It sends `tool_choice="required"`. Each request is another conversation here too."""
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIModel(model_id="policy", api_base=served.server.base_url, api_key=served.episode.api_key)

    @smolagents.tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    agent = smolagents.ToolCallingAgent(tools=[add], model=model, verbosity_level=0)
    said = [CALL, called({"name": "final_answer", "arguments": {"answer": "5"}})]
    served.generation.texts += said
    assert agent.run("2+3") == "5"
    rows = sorted(served.rows(), key=lambda row: len(row.prompt))
    assert [served.tokenizer.decode(row.tokens) for row in rows] == [turn + END for turn in said]


def test_smolagents(served: Served) -> None:
    """A code agent, with stop strings of its own. It rewrites its turns, so each request is another conversation."""
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIModel(model_id="policy", api_base=served.server.base_url, api_key=served.episode.api_key)
    agent = smolagents.CodeAgent(tools=[], model=model, verbosity_level=0)
    code = ["Thought: print it\n<code>\nprint(2 + 3)\n</code>", "Thought: done\n<code>\nfinal_answer(5)\n</code>"]
    served.generation.texts += code
    assert agent.run("2+3") == 5
    assert all(turn.options.stop for turn in served.generation.turns)
    rows = sorted(served.rows(), key=lambda row: len(row.prompt))
    assert [served.tokenizer.decode(row.tokens) for row in rows] == [turn + END for turn in code]
    assert [list(row.prompt) for row in rows] == [turn.prompt for turn in served.generation.turns]
    assert all(all(row.sampled) for row in rows) and "Last output" in served.tokenizer.decode(rows[1].prompt)
