"""Rollouts over simulated engines: the order of requests, and the state of sequences at any pause."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.config.generation import VllmConfig
from dagrl.data.tokenization import Prompt
from dagrl.rl.agents.runner import AgentRunner
from dagrl.rl.environments import FAILED, Question, Reply
from dagrl.rl.generation import FinishedRequest
from dagrl.rl.rollout.episodes import ABORTED, Episode, RolloutGroup, Sample
from dagrl.rl.rollout.rollouts import IN_FLIGHT, Rollouts
from dagrl.rl.rollout.turns import AgentTurns, EnvironmentTurns
from dagrl.run.model import character_tokenizer
from dagrl.runtime.shapes import Batch
from tests.unit.run.simulated_run import Run, engines_of
from tests.unit.run.test_async_loop import configuration

PROMPT = Prompt("1+", np.array([4, 5]), "", "row 0")
LIMIT, ROOM = 10, 40
KEY = 100
"""The key of group 0."""


class ManualEnvironment:
    """An environment that answers when the test calls `answer`."""

    max_turns = 2

    def __init__(self, workers: int = 1, opens: bool = False) -> None:
        self.workers, self.opens = workers, opens
        self.closed: list[str] = []
        self.calls: list[tuple[list[str], Future[list[Reply]]]] = []

    def submit(self, worker: int, questions: Sequence[Question]) -> Future[list[Reply]]:
        self.calls.append(([question.turns[-1] if question.turns else "reset" for question in questions], Future()))
        return self.calls[-1][1]

    def close(self, key: str) -> None:
        self.closed.append(key)

    def answer(self, *replies: Reply) -> None:
        self.calls.pop(0)[1].set_result(list(replies))


class Bench:
    def __init__(self, environment: ManualEnvironment | AgentRunner | None = None, **generation: Any) -> None:
        self.run = Run(configured(**generation), seed=0)
        self.engines, self.batches = self.run.engines, list[Batch]()
        submit = self.run.submit

        def kept(name: str, batch: Batch, rows: Any = ()) -> Any:
            self.batches.append(batch)
            return submit(name, batch, rows)

        self.run.submit = kept  # type: ignore[method-assign]
        run, tokenizer = self.run, self.run.inputs.tokenizer
        if isinstance(environment, AgentRunner):
            self.turns: Any = AgentTurns(environment)
        else:
            self.turns = EnvironmentTurns(run.config, tokenizer, environment)  # type: ignore[arg-type]
        self.rollouts = Rollouts(run.config, engines_of(run), self.turns)

    def ask(self, group: RolloutGroup) -> None:
        self.rollouts._groups[group.number] = group
        ended = FinishedRequest(0, (), (), (), "stop")
        self.turns.finish([((group, episode), ended) for episode in group.episodes])

    def finish(self) -> list[RolloutGroup]:
        complete: list[RolloutGroup] = []
        for _ in range(100):
            complete += self.rollouts.advance() if self.rollouts.generating else []
        return complete


def configured(**generation: Any) -> Config:
    config = configuration({}, room=ROOM)
    changed = config.policy.generation.model_copy(update=generation)
    return config.model_copy(update={"policy": config.policy.model_copy(update={"generation": changed})})


def group(number: int, *episodes: Episode, cohort: int = 0) -> RolloutGroup:
    return RolloutGroup(number, KEY + number, list(episodes), cohort)


def fresh(seed: int) -> Episode:
    return Episode(PROMPT, seed, LIMIT)


def begun(count: int, **fields: Any) -> Episode:
    """Returns a sequence that has tokens of its current turn."""
    columns = [4] * count, [-1.0] * count, [0] * count, [True] * count
    return Episode(PROMPT, 7, LIMIT, *columns, **fields)


def start_many(bench: Bench) -> list[Episode]:
    """Starts more sequences than the engines hold, most longer than a quantum."""
    episodes = [fresh(seed) for seed in range(12)]
    for number in range(6):
        bench.rollouts.start(group(number, *episodes[2 * number : 2 * number + 2], cohort=3))
    return episodes


def check_whole(episodes: Sequence[Episode]) -> None:
    for episode in episodes:
        columns = episode.tokens, episode.logprobs, episode.versions, episode.sampled
        assert 0 < len(episode.tokens) <= LIMIT and len({len(column) for column in columns}) == 1
        assert episode.finish_reason in ("stop", "length")


def test_withdrawn_requests_begin_again_with_equal_tokens() -> None:
    undisturbed, bench = Bench(), Bench()
    expected, episodes = start_many(undisturbed), start_many(bench)
    undisturbed.finish()
    complete = bench.rollouts.advance()
    assert any(bench.engines.requests)
    complete += bench.rollouts.withdraw()
    assert not any(bench.engines.requests), "engines hold nothing while they sleep"
    complete += bench.finish()
    assert sorted(done.number for done in complete) == list(range(6)) and not bench.rollouts.busy
    assert not bench.rollouts.generating, "each is one request again"
    check_whole(episodes)
    assert [one.tokens.tolist() for one in episodes] == [one.tokens.tolist() for one in expected]


def test_a_quantum_without_steps_brings_engines_to_rest() -> None:
    bench = Bench()
    start_many(bench)
    bench.rollouts.advance()
    bench.rollouts.settle()
    assert any(bench.engines.requests)
    assert [batch.scalars["engine_steps"] for batch in bench.batches] == [(3, 3)] * IN_FLIGHT + [(0, 0)]
    bench.finish()
    sent = len(bench.batches)
    bench.rollouts.settle()
    assert len(bench.batches) == sent, "those that hold none are at rest"


def test_aborted_groups_leave_engines_and_queue_and_finished_episodes_keep_their_reason() -> None:
    bench = Bench()
    ended, one, other = fresh(0), fresh(1), fresh(2)
    bench.rollouts.start(group(0, ended, *map(fresh, range(10, 20))))
    bench.rollouts.start(group(1, one, other))
    bench.rollouts.advance()
    bench.rollouts.settle()
    ended.finish_reason = "stop"
    bench.rollouts.abort([0])
    assert bench.rollouts.numbers == {1} and ended.finish_reason == "stop"
    bench.finish()
    bench.rollouts.settle()
    check_whole([one, other])
    assert not any(bench.engines.requests)
    bench.rollouts.start(group(2, last := fresh(3)))
    bench.rollouts.abort([2])
    assert last.finish_reason == ABORTED and not bench.rollouts.busy and not bench.rollouts.generating


def test_a_sequence_whose_turn_has_ended_is_sent_to_the_environment_and_not_generated() -> None:
    environment = ManualEnvironment()
    bench, episode = Bench(environment), begun(2, turns=1)
    bench.ask(group(0, episode))
    assert not bench.rollouts.generating and len(bench.turns.awaited) == 1
    assert environment.calls[0][0] == [bench.run.inputs.tokenizer.decode(episode.tokens)]
    environment.answer(Reply("00"))
    assert bench.rollouts.advance() == [] and len(bench.batches) == IN_FLIGHT, "it is in the first quantum after the answer"
    assert bench.batches[0]["lengths"].tolist() == [len(PROMPT) + 2 + 2]
    bench.finish()
    assert episode.turns == 2 and episode.sampled[:5].tolist() == [True, True, False, False, True]


def test_the_environment_gives_the_prompt_before_the_first_turn() -> None:
    environment = ManualEnvironment(opens=True)
    bench, own, longer, too_long, failed = Bench(environment), *map(fresh, range(4))
    bench.rollouts.start(group(0, own, longer), group(1, too_long, failed))
    assert [texts for texts, _ in environment.calls] == [["reset"] * 4], "one call for all groups"
    assert not bench.rollouts.generating and not bench.batches
    given = replace(PROMPT, text="1+1+", tokens=np.array([4, 5, 4, 5]))
    huge = replace(PROMPT, text="1" * ROOM, tokens=np.full(ROOM, 4))
    environment.answer(Reply(None), Reply(None, prompt=given), Reply(None, prompt=huge), Reply(None, FAILED, "it raised"))
    assert [actual.number for actual in bench.rollouts.advance()] == [1]
    assert bench.batches[0]["lengths"].tolist() == [2, 4]
    assert own.prompt is PROMPT and longer.prompt is given
    assert too_long.finish_reason == FAILED and f"a prompt of {ROOM} tokens" in too_long.failure
    assert (failed.finish_reason, failed.failure, failed.tokens.tolist()) == (FAILED, "it raised", [])
    assert environment.closed == ["1/0"]


def test_the_overhead_of_quanta_is_recorded() -> None:
    bench = Bench(quantum_engine_steps=None)
    collect = bench.run.collect

    def costly(name: str, replay: Any, busy_s: Any = None) -> Any:
        results, counted = collect(name, replay)
        return results, replace(counted, overhead_s=0.25)

    bench.run.collect = costly  # type: ignore[method-assign]
    bench.rollouts.start(group(0, fresh(0), fresh(1)))
    bench.rollouts.advance()
    assert bench.rollouts.quantum_size.overhead_s == 0.25


def test_without_an_environment_no_turn_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a conversation is rendered again, and only then are the texts of its turns needed."""
    bench = Bench()
    monkeypatch.setattr(bench.turns, "_chat", None)
    bench.rollouts.start(group(0, fresh(1), fresh(2)))
    assert [episode.renders_again for item in bench.finish() for episode in item.episodes] == [None, None]


def test_settle_collects_finished_answers_but_not_those_of_aborted_groups() -> None:
    environment = ManualEnvironment()
    bench, ends, fails, goes_on, aborted = Bench(environment), *(begun(2, turns=1) for _ in range(4))
    bench.ask(group(1, aborted))
    bench.rollouts.abort([1])
    environment.answer(Reply("00"))
    assert bench.rollouts.settle() == [] and not bench.rollouts.generating
    assert aborted.tokens.tolist() == [4] * 2 and aborted.finish_reason == ABORTED
    bench.ask(group(0, ends, fails, goes_on))
    environment.answer(Reply(None), Reply(None, FAILED, "it raised"), Reply("0"))
    assert bench.rollouts.settle() == [] and not bench.turns.awaited
    assert (ends.finish_reason, fails.finish_reason, fails.failure) == ("stop", FAILED, "it raised")
    assert goes_on.tokens.tolist() == [4] * 3 and goes_on.turn_start == 3 and bench.rollouts.generating


def test_questions_are_split_over_the_environment_processes() -> None:
    environment = ManualEnvironment(workers=3)
    bench = Bench(environment)
    bench.ask(group(0, *(begun(count, turns=1) for count in (1, 2, 3, 4))))
    assert [[len(text) for text in texts] for texts, _ in environment.calls] == [[1, 4], [2], [3]]
    bench.ask(group(1, begun(1, turns=1)))
    assert len(environment.calls) == 4, "no call about nothing"


@pytest.mark.parametrize(("words", "reason"), [(ROOM - 2 - 5, "length"), (ROOM - 2 - 5 - 1, "")])
def test_an_answer_that_fills_the_context_ends_the_sequence(words: int, reason: str) -> None:
    environment = ManualEnvironment()
    bench, episode = Bench(environment), begun(5, turns=1)
    bench.ask(group(0, episode))
    environment.answer(Reply("0" * words))
    bench.rollouts.settle()
    assert episode.finish_reason == reason
    if not reason:
        bench.finish()
        assert bench.batches[0]["max_new_tokens"].tolist() == [1] and len(episode) == ROOM


def test_requests_are_ordered_by_cohort_and_may_make_a_whole_turn() -> None:
    bench = Bench(vllm_cfg=VllmConfig(max_num_seqs=3))
    for count, cohort in ((3, 1), (9, 0), (2, 0), (1, 0)):
        bench.rollouts.start(group(count, begun(count, turn_start=count), cohort=cohort))
    bench.rollouts.look_ahead()
    batch = bench.batches[0]
    assert (batch["lengths"] - len(PROMPT)).tolist() == [9, 2, 1, 3]
    assert batch["max_new_tokens"].tolist() == [LIMIT] * 4


def test_turns_go_on_after_answers_until_they_are_the_most() -> None:
    environment = ManualEnvironment()
    bench, episodes = Bench(environment), [begun(4, turn_start=4) for _ in range(6)]
    for seed, episode in enumerate(episodes):
        episode.seed = seed
    bench.rollouts.start(group(5, *episodes))
    bench.finish()
    bench.rollouts.settle()
    answered = [episode for episode in episodes if not episode.finish_reason]
    cut = [episode.finish_reason for episode in episodes if episode.finish_reason]
    assert answered and cut and set(cut) == {"length"}, "the environment has nothing to say to half a turn"
    while environment.calls:
        environment.answer(*[Reply("000")] * len(environment.calls[0][0]))
    bench.rollouts.settle()
    bench.finish()
    while environment.calls:  # the last turn has a reward too
        environment.answer(*[Reply("000", reward=1.0)] * len(environment.calls[0][0]))
    bench.rollouts.settle()
    assert not bench.rollouts.busy and {episode.turns for episode in answered} == {2}, "two turns are the most"
    stopped = [episode for episode in answered if episode.finish_reason == "stop"]
    assert all(episode.turn_rewards == [None, 1.0] and episode.sampled[-1] for episode in stopped)
    assert len(environment.closed) == len(set(environment.closed)) == len(episodes)


@pytest.mark.parametrize(("turn", "end", "again"), [("2E", "", True), ("2<eos>", "", False), ("2\n", "E", True)])
def test_a_turn_gets_one_end_and_the_templates_text(turn: str, end: str, again: bool) -> None:
    """ChatML on a base model: the template ends turns with another token than the tokenizer's end of sequence."""
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}E\n{% endfor %}{{ 'a' if add_generation_prompt }}"
    tokenizer = character_tokenizer("0123456789+=uaE\n", template)
    asked, more = {"role": "user", "content": "1+1="}, {"role": "user", "content": "2+2="}
    ids = tokenizer(tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True))["input_ids"]
    environment = ManualEnvironment()
    turns = EnvironmentTurns(configured(), tokenizer, environment)  # type: ignore[arg-type]
    episode = Episode(replace(PROMPT, tokens=np.array(ids), messages=[asked]), 0, LIMIT)
    for text, reply in ((turn, [more]), ("4E", None)):
        tokens = tokenizer(text)["input_ids"]
        result = FinishedRequest(0, tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop")
        episode.append(result)
        episode.turns += 1
        turns.finish([((group(0, episode), episode), result)])
        environment.answer(Reply(reply))  # type: ignore[arg-type]
        turns.take()
        environment.max_turns += 1
    assert "".join(tokenizer.convert_ids_to_tokens(episode.tokens)) == f"{turn}{end}\nu2+2=E\na4E"
    share = turns.metrics([Sample(episode.prompt, episode, "")])["environment/rendered_differently"]
    assert (episode.renders_again, share) == (again, float(not again))
