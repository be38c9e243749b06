"""Agents in processes of their own, over simulated engines."""

import copy
import random
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dagrl.config import Config, EnvironmentConfig
from dagrl.data.tokenization import Prompt
from dagrl.rl.agents.runner import AgentPool, AgentRunner
from dagrl.rl.environments import FAILED
from dagrl.rl.functions.answers import Failed
from dagrl.rl.functions.process import ENDED
from dagrl.rl.rewards import Rewards
from dagrl.rl.rollout.batches import train_batch
from dagrl.rl.rollout.engines import PromptData
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, request_seeds, samples_of
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.scoring import scored_group
from dagrl.rl.rollout.turns import AgentTurns, TurnEpisode
from tests.integration.processes import ends_within
from tests.unit.rl.test_rollout import LIMIT, Bench, configured
from tests.unit.run.simulated_run import Reward, Run, Stop, engines_of

pytest.importorskip("uvicorn")

TIMEOUT_S = 3.0
AGENTS = """
import asyncio, json, os, time, urllib.request

def ask(endpoint, *messages, timeout=20, **body):
    roles = ("user", "assistant", "user")
    body["messages"] = [{"role": role, "content": text} for role, text in zip(roles, messages)]
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    content = json.dumps({"model": endpoint.model, **body}).encode()
    request = urllib.request.Request(endpoint.base_url + "/chat/completions", content, headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def agent(example, endpoint):
    return globals()[example["task"]](example, endpoint)

def continues(example, endpoint):
    first = ask(endpoint, example["prompt"])
    ask(endpoint, example["prompt"], first, "=")
    return {"right": 0.5, "form": 1}

def branches(example, endpoint):
    for prompt in ("1+", "2+"):
        ask(endpoint, prompt)
    return 2

def raises(example, endpoint):
    ask(endpoint, "1+")
    raise ValueError("no idea")

def dies(example, endpoint):
    os._exit(3)

def dies_in_company(example, endpoint):
    ask(endpoint, "1+")
    time.sleep(0.3)
    os._exit(3)

def waits_long(example, endpoint):
    ask(endpoint, "1+")
    time.sleep(0.5)
    return 1.0

def hangs(example, endpoint):
    time.sleep(100)

def samples_otherwise(example, endpoint):
    ask(endpoint, "1+", temperature=0.5)
    return 1.0

def is_silent(example, endpoint):
    return 1.0

def says_text(example, endpoint):
    ask(endpoint, "1+")
    return "good"

def gives_up(example, endpoint):
    try:
        ask(endpoint, "1+", timeout=0.5)
    except TimeoutError:
        ask(endpoint, "2+")
    return 1.0

def waits(example, endpoint):
    ask(endpoint, "1+")

async def sleeps(example, endpoint):
    await asyncio.sleep(example["for"])
    return example["for"]

async def ends_or_sleeps(example, endpoint):
    if example["for"] < 0:
        os._exit(3)
    return await sleeps(example, endpoint)

async def blocks(example, endpoint):
    time.sleep(100)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("agents")
    (directory / "agents_of_test.py").write_text(AGENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        yield "agents_of_test"


def with_agent(module: str, **environment: object) -> Config:
    config = configured()
    settings = EnvironmentConfig.model_validate({"agent": f"{module}:agent", "agent_timeout_s": TIMEOUT_S, **environment})
    return config.model_copy(update={"environment": settings})


class AgentBench(Bench):
    def run_all(self) -> list[RolloutGroup]:
        complete: list[RolloutGroup] = []
        while self.rollouts.busy:
            self.wait()
            complete += self.rollouts.advance()
        return complete

    def wait(self) -> None:
        if not self.rollouts.generating:
            done = wait(self.turns.awaited, 30.0, FIRST_COMPLETED).done
            assert done, "nothing happens"


@pytest.fixture(scope="module")
def runner(module: str) -> Iterator[AgentRunner]:
    config = with_agent(module, max_conversations=2)
    tokenizer = copy.deepcopy(Bench().run.inputs.tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with AgentRunner(config, tokenizer) as started:
        yield started


def asked(task: str, seed: int = 0) -> Episode:
    return Episode(Prompt("7+", np.array([4]), "", "row 0", task=task), seed, LIMIT)


def group(number: int, *tasks: str) -> RolloutGroup:
    return RolloutGroup(number, number, [asked(task, seed) for seed, task in enumerate(tasks)])


def test_conversations_are_rows_and_what_the_agent_returns_is_its_reward(runner: AgentRunner) -> None:
    bench = AgentBench(runner)
    bench.rollouts.start(group(0, "continues", "branches"))
    (complete,) = bench.run_all()
    one, two = complete.episodes
    tokenizer = bench.run.inputs.tokenizer
    assert tokenizer.decode(one.prompt.tokens) == "7+" and (one.turns, two.turns) == (2, 2)
    assert one.reward_parts == {"right": 0.5, "form": 1.0} and not one.more
    assert (two.reward_parts, len(two.more), two.prompt.text[1]) == ({"environment": 2.0}, 1, "+")
    assert [tokenizer.decode(one.tokens[start:end]) for start, end in one.spans() if not one.sampled[start]] == ["="]
    batch = train_batch(samples_of(tokenizer, complete), np.array([1.0, -1.0], np.float32), rows_per_sample=2)
    lengths = [len(one), 0, len(two), len(two.more[0])]
    assert batch["lengths"].tolist() == lengths and batch["loss_mask"][1].sum() == 0
    assert batch["advantages"].sum(axis=1).tolist() == [sum(one.sampled), 0, -sum(two.sampled), -sum(two.more[0].sampled)]


FAILURES = {
    "raises": "ValueError: no idea",
    "dies": "the process that runs it ended",
    "hangs": f"no answer within environment.agent_timeout_s = {TIMEOUT_S:g} s",
    "is_silent": "the agent returned without an answer of the policy",
    "says_text": "it returned 'good'; expected: a number, numbers by name, or None",
}


@pytest.mark.parametrize("task", FAILURES)
def test_a_failing_agent_fails_its_sample(runner: AgentRunner, task: str) -> None:
    bench = AgentBench(runner)
    bench.rollouts.start(group(0, task))
    (complete,) = bench.run_all()
    (episode,) = complete.episodes
    assert episode.finish_reason == FAILED and FAILURES[task] in episode.failure
    bench.rollouts.start(group(1, "branches"))
    assert bench.run_all()[0].episodes[0].finish_reason in ("stop", "length"), "the next one has a process"


def test_the_others_of_a_lost_process_start_again(runner: AgentRunner) -> None:
    """One episode ends its process, again and again. The others lose what they had asked, and ask it again."""
    bench = AgentBench(runner)
    bench.rollouts.start(group(0, "branches", "dies_in_company", "waits_long", "waits_long", "waits_long"))
    (complete,) = bench.run_all()
    fine, dead, *waited = complete.episodes
    assert dead.finish_reason == FAILED and FAILURES["dies"] in dead.failure
    assert (
        not any(one.failure for one in (fine, *waited)) and fine.reward_parts == {"environment": 2.0} and len(fine.more) == 1
    )
    assert [(one.turns, one.reward_parts, len(one.more)) for one in waited] == [(1, {"environment": 1.0}, 0)] * 3, (
        "the last start's"
    )
    bench.rollouts.start(RolloutGroup(1, 1, [asked("waits_long", seed=2)]))
    (undisturbed,) = bench.run_all()[0].episodes
    assert waited[0].tokens.tolist() == undisturbed.tokens.tolist(), "seeds do not depend on how often an episode started"


def test_a_batch_without_trained_tokens_has_metrics(runner: AgentRunner, module: str) -> None:
    bench, config = AgentBench(runner), with_agent(module)
    bench.rollouts.start(group(0, "samples_otherwise", "samples_otherwise"))
    (complete,) = bench.run_all()
    samples = samples_of(bench.run.inputs.tokenizer, complete)
    rewards = Rewards(np.ones(2, np.float32), np.ones(2, np.bool_))
    metrics = Resumable(runner, config).experience.metrics([scored_group(config, complete, samples, rewards)])
    made = sum(len(one.tokens) for one in complete.episodes)
    assert metrics["environment/untrained_tokens"] == made > 0
    assert metrics["staleness/policy_age_max"] == metrics["staleness/policy_age_mean"] == 0


def test_an_aborted_group_leaves_nothing(runner: AgentRunner) -> None:
    bench = AgentBench(runner)
    bench.rollouts.start(group(0, "waits", "hangs"))
    bench.rollouts.start(group(1, "branches"))
    bench.wait()
    bench.rollouts.advance()
    bench.rollouts.settle()
    bench.rollouts.abort([0])
    assert [done.number for done in bench.run_all()] == [1]
    assert not runner._server.episodes and not any(bench.engines.requests) and not bench.rollouts.generating


def test_a_request_whose_client_has_gone_leaves_the_engines(runner: AgentRunner) -> None:
    bench = AgentBench(runner)
    seed = next(seed for seed in range(100) if _length(seed) > LIMIT)
    bench.rollouts.start(RolloutGroup(0, 0, [asked("gives_up", seed)]))
    bench.wait()
    bench.rollouts.advance()
    ((_, request),) = bench.rollouts._requests.values()
    assert isinstance(request, TurnEpisode) and (turn := request.turn) is not None and any(bench.engines.requests)
    assert ends_within(20.0, lambda: not turn.cancelled)
    bench.rollouts.advance()
    assert all(episode is not request for _, episode in bench.rollouts._requests.values())
    (complete,) = bench.run_all()
    (episode,) = complete.episodes
    assert episode.prompt.text == "2+" and episode.turns == 1 and not episode.more and not any(bench.engines.requests)


def test_a_request_begins_again_after_its_engine_slept(runner: AgentRunner) -> None:
    bench = AgentBench(runner)
    seed = next(seed for seed in range(100) if _length(seed) > LIMIT)
    bench.rollouts.start(RolloutGroup(0, 0, [asked("branches", seed)]))
    bench.wait()
    bench.rollouts.advance()
    bench.rollouts.withdraw()
    assert not any(bench.engines.requests)
    ((_, request),) = bench.rollouts._requests.values()
    assert not len(request.tokens)
    (complete,) = bench.run_all()
    (episode,) = complete.episodes
    assert episode.finish_reason == "length" and not episode.failure
    rows = [episode, *episode.more]
    (row,) = [row for row in rows if row.prompt.text == "1+"]
    assert len(row.tokens) == LIMIT and all(row.sampled)


def _length(seed: int) -> int:
    """Returns how many tokens the simulated engine gives the first request of an episode."""
    (drawn,) = request_seeds(seed, 0, 1)
    return random.Random(drawn).randint(1, 2 * LIMIT)  # noqa: S311  # not cryptography


def test_unfinished_episodes_start_again_in_a_resumed_run(runner: AgentRunner, module: str) -> None:
    """Under the numbers and with the seeds that they had."""
    first, second = (Resumable(runner, with_agent(module)) for _ in range(2))
    first.experience.fill()
    first.wait()
    first.experience.rollouts.advance()
    state = first.experience.state()
    seeds = {group.number: [one.seed for one in group.episodes] for group in first.experience.rollouts.groups}
    first.stop()
    second.experience.restore(state)
    second.experience.fill()
    again = second.experience.rollouts.groups
    assert {group.number: [one.seed for one in group.episodes] for group in again} == seeds and len(seeds) == 3
    assert not any(len(one.tokens) for group in again for one in group.episodes)
    second.stop()
    assert not runner._server.episodes


class Resumable:
    """The experience of one process of a run, with agents that ask once."""

    def __init__(self, runner: AgentRunner, config: Config) -> None:
        self.run = run = Run(config, seed=0)
        prompts = [replace(prompt, task="waits") for prompt in run.inputs.prompts]
        data = PromptData(prompts, [], run.inputs.tokenizer)
        reward, engines = Reward(run.world, 1.0), engines_of(run)
        self.turns = AgentTurns(runner)
        self.experience = Experience(config, data, engines, reward, self.turns, Stop(run), version=0)  # type: ignore[arg-type]

    def wait(self) -> None:
        assert wait(self.turns.awaited, 30.0, FIRST_COMPLETED).done

    def stop(self) -> None:
        self.experience.rest()
        self.experience.rollouts.abort(self.experience.rollouts.numbers)


def test_episodes_of_a_process_run_together_up_to_a_limit(module: str) -> None:
    config = EnvironmentConfig(max_concurrency=2)
    pool = AgentPool(f"{module}:sleeps", config)
    pool.start()
    try:
        pool.submit("first", _request(0)).result(30.0)
        begun = time.monotonic()
        futures = [pool.submit(str(place), _request(0.4)) for place in range(4)]
        pool.cancel("3")
        assert [future.result(30.0) for future in futures[:3]] == [0.4] * 3
        assert time.monotonic() - begun >= 0.8 and futures[3].cancelled(), "two at once, then one"
    finally:
        pool.close()


def test_a_process_that_does_not_answer_is_ended(module: str) -> None:
    """A coroutine that blocks its loop blocks all episodes of its process."""
    pool = AgentPool(f"{module}:blocks", EnvironmentConfig(agent_timeout_s=0.3))
    pool.start()
    try:
        answer = pool.submit("a", _request(0)).result(30.0)
        assert answer == Failed("its process did not answer within environment.agent_timeout_s = 0.3 s")
    finally:
        pool.close()


def test_a_process_that_ends_in_its_import_is_replaced(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = "import os, pathlib\nmark = pathlib.Path(__file__).with_name('mark')\n"
    once += "if mark.exists(): mark.unlink(); os._exit(3)\nfrom agents_of_test import ends_or_sleeps\n"
    (tmp_path / "ends_once.py").write_text(once)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = AgentPool("ends_once:ends_or_sleeps", EnvironmentConfig())
    pool.start()
    try:
        assert pool.submit("a", _request(0.1)).result(30.0) == 0.1
        (tmp_path / "mark").touch()
        assert pool.submit("b", _request(-1)).result(30.0) == Failed(ENDED)
        assert pool.submit("c", _request(0.1)).result(30.0) == 0.1
    finally:
        pool.close()


def _request(seconds: float) -> dict[str, object]:
    return {"example": {"for": seconds}, "endpoint": {"base_url": "", "api_key": "", "model": ""}}
