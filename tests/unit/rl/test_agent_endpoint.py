"""The OpenAI-compatible endpoint with OpenAI's client: answers, rejected requests, and recorded tokens."""

import copy
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from dagrl.data.tokenization import Prompt
from dagrl.errors import ConfigError
from dagrl.rl.agents.conversations import EpisodeRows, Row, message_key
from dagrl.rl.agents.episode import AgentEpisode, Limits, Turn
from dagrl.rl.agents.rendering import Renderer
from dagrl.rl.agents.server import EndpointServer, Inbox
from dagrl.rl.generation import FinishedRequest
from dagrl.rl.rollout.episodes import Episode, RolloutGroup
from dagrl.rl.rollout.turns import AgentTurns
from dagrl.runtime.deadline import Deadline
from tests.integration.processes import ends_within
from tests.unit.rl.test_environment import CHARACTERS, TOOLS_TEMPLATE

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

END, EOS = "<|im_end|>", 1
LIMITS = Limits(room=400, max_new_tokens=40, max_turns=5, temperature=1.0, top_p=1.0, stop=("STOP",))
STOP = Deadline(20.0, "of the test")
ASKED = [{"role": "user", "content": "2+3"}]


def merging_tokenizer() -> Any:
    """Returns a tokenizer with a token per character and one for `ab`, so that a text has several tokenizations."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", END, "<unk>", *CHARACTERS, "ab"]
    model = models.BPE({word: place for place, word in enumerate(words)}, [("a", "b")], unk_token="<unk>")  # noqa: S106
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": END, "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = TOOLS_TEMPLATE
    return fast


class ScriptedGeneration:
    """A test double of the driver: answers each request with the next text, at policy `version`.

    It says every character as a token of its own, and ends with the end of sequence.
    """

    def __init__(self, inbox: Inbox, tokenizer: Any) -> None:
        self.texts: list[str] = []
        self.turns: list[Turn] = []
        self.version = 3
        self._inbox, self._tokenizer, self._ended = inbox, tokenizer, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ended = True
        self._inbox.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            wait([self._inbox.news], 5.0)
            for _, turn in self._inbox.take():
                self.turns.append(turn)
                if self.texts:
                    self._say(turn, self.texts.pop(0))

    def _say(self, turn: Turn, text: str) -> None:
        tokens = [*self._tokenizer.convert_tokens_to_ids(list(text)), EOS][: turn.max_new_tokens]
        versions = [self.version + place // 4 for place in range(len(tokens))]
        logprobs = [-0.1 * (place + 1) for place in range(len(tokens))]
        reason = "stop" if tokens[-1] == EOS else "length"
        turn.finish(FinishedRequest(0, tokens, logprobs, versions, reason))


class Served:
    """A server, one episode, and a client with its key."""

    def __init__(self, tokenizer: Any = None, media: Any = None, says: Any = ScriptedGeneration, parser: str = "hermes"):
        self.tokenizer = tokenizer or merging_tokenizer()
        renderer = Renderer(copy.deepcopy(self.tokenizer), parser, media=media)
        self.server = EndpointServer("127.0.0.1", 0, renderer, LIMITS, Inbox())
        self.server.start()
        self.generation = says(self.server.inbox, self.tokenizer)
        self.begin()

    def close(self) -> None:
        self.generation.close()
        self.server.stop(STOP)

    def begin(self) -> None:
        self.episode = AgentEpisode("0/0", f"key {len(self.server.episodes)}", LIMITS)
        self.server.episodes[self.episode.api_key] = self.episode
        self.client = openai.OpenAI(base_url=self.server.base_url, api_key=self.episode.api_key, max_retries=0, timeout=20)

    def chat(self, messages: Sequence[Any], said: str, **options: Any) -> Any:
        self.generation.texts.append(said)
        with_ids = {"logprobs": True, "extra_body": {"return_token_ids": True}}
        return self.client.chat.completions.create(model="policy", messages=list(messages), **{**with_ids, **options})

    def ids(self, text: str) -> list[int]:
        actual: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return actual

    def rendered(self, messages: Sequence[Any]) -> str:
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))

    def rows(self, most: int = 9) -> list[Row]:
        return list(self.episode.rows(most).rows)


@pytest.fixture(scope="module")
def module_server() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platform._Processor.get", str)  # the client's headers name the machine; it would run `uname`
        served = Served()
        yield served
        served.close()


@pytest.fixture
def served(module_server: Served) -> Served:
    module_server.begin()
    module_server.generation.texts.clear()
    module_server.generation.turns.clear()
    return module_server


def test_an_answer_has_its_tokens_logprobs_and_versions(served: Served) -> None:
    answer = served.chat(ASKED, "five ab")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "five ab", "stop")
    assert answer.prompt_token_ids == served.ids(served.rendered(ASKED))
    tokens = choice.token_ids
    assert served.tokenizer.decode(tokens) == f"five ab{END}" and len(tokens) == 8
    assert [item.logprob for item in choice.logprobs.content] == pytest.approx([-0.1 * place for place in range(1, 9)])
    assert "".join(item.token for item in choice.logprobs.content) == f"five ab{END}"
    assert answer.policy_versions == [3, 4]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(answer.prompt_token_ids), 8)
    (row,) = served.rows()
    assert (list(row.prompt), row.tokens) == (answer.prompt_token_ids, tokens)
    assert row.versions == [3] * 4 + [4] * 4 and all(row.sampled)


def test_a_longer_conversation_keeps_the_tokens_that_were_sampled(served: Served) -> None:
    """`ab` was sampled as two tokens. Its text has one, so a rendering from text would train on others."""
    first = served.chat(ASKED, "ab")
    said = {"role": "assistant", "content": first.choices[0].message.content}
    more = [*ASKED, said, {"role": "user", "content": "and 1+1?"}]
    second = served.chat(more, "two", temperature=1.0)
    sampled = first.choices[0].token_ids
    before = [*first.prompt_token_ids, *sampled]
    assert len(sampled) == 3 and second.prompt_token_ids[: len(before)] == before
    assert served.tokenizer.decode(second.prompt_token_ids) == served.rendered(more), "as the template writes it"
    assert second.prompt_token_ids != served.ids(served.rendered(more))
    (row,) = served.rows()
    learned = [token for token, in_loss in zip(row.tokens, row.sampled, strict=True) if in_loss]
    assert learned == [*sampled, *second.choices[0].token_ids]
    assert [*row.prompt, *row.tokens] == [*second.prompt_token_ids, *second.choices[0].token_ids]
    assert all(logprob == 0 for logprob, in_loss in zip(row.logprobs, row.sampled, strict=True) if not in_loss)


def test_branches_are_rows_and_share_no_token_in_the_loss(served: Served) -> None:
    said = {"role": "assistant", "content": "ab"}
    served.chat(ASKED, "ab")
    served.chat([*ASKED, said, {"role": "user", "content": "left"}], "l")
    served.chat([*ASKED, said, {"role": "user", "content": "right"}], "right")
    served.chat([{"role": "system", "content": "another"}], "other")
    learned = sorted("".join(learned_texts(served, row)) for row in served.rows())
    assert learned == sorted([f"ab{END}right{END}", f"l{END}", f"other{END}"]), "the most tokens first"
    kept = served.episode.rows(1)
    assert len(kept.rows) == 1 and kept.untrained == len("l.other.")
    assert sorted("".join(learned_texts(served, row)) for row in kept.others) == sorted([f"ab{END}l{END}", f"other{END}"])


def learned_texts(served: Served, row: Row) -> list[str]:
    return [served.tokenizer.decode([token]) for token, in_loss in zip(row.tokens, row.sampled, strict=True) if in_loss]


def test_answers_with_other_sampling_parameters_are_context(served: Served) -> None:
    served.chat(ASKED, "ab", temperature=0.2)
    (turn,), (row,) = served.generation.turns, served.rows()
    assert turn.options.temperature == 0.2 and not any(row.sampled) and served.episode.rows(1).untrained == 3


def test_a_stream_has_the_same_text_and_tokens(served: Served) -> None:
    stream = served.chat(ASKED, "ab STO ab STOP more", stream=True, stream_options={"include_usage": True})
    *chunks, usage = list(stream)
    (choice,) = [chunk.choices[0] for chunk in chunks]
    assert choice.delta.content == "ab STO ab ", "without the stop string"
    (row,) = served.rows()
    assert choice.token_ids == row.tokens and usage.usage.completion_tokens == len(row.tokens) == 20
    assert [item.logprob for item in choice.logprobs.content] == pytest.approx(row.logprobs)
    assert choice.finish_reason == "stop" and usage.policy_versions == [3, 4, 5, 6, 7]
    answered = [*ASKED, {"role": "assistant", "content": choice.delta.content}, {"role": "user", "content": "go on"}]
    (only,) = served.chat(answered, "x", stream=True)
    assert only.choices[0].delta.content == "x" and only.usage is None, "without include_usage every chunk has a choice"
    assert len(served.rows()) == 1


def asks(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "several answers": ({"n": 2}, r"n = 2 is not supported here\. Leave it out; supported are: .*tools"),
    "a format": ({"response_format": {"type": "json_object"}}, "response_format = .* is not"),
    "logprobs of others": ({"logprobs": True, "top_logprobs": 3}, "top_logprobs = 3 is not"),
    "a choice": ({"tool_choice": "any"}, "tool_choice.*found 'any'"),
    "a temperature": ({"temperature": 5.0}, r"temperature: .*less than or equal to 2; found 5\.0"),
    "a model": ({"model": "gpt-4o"}, "there is no model 'gpt-4o'; ask for 'policy'"),
    "no messages": ({"messages": []}, "messages: .*at least 1 item"),
    "no role": ({"messages": [{"content": "x"}]}, r"messages\.0\.role is missing"),
    "an image": (asks([IMAGE]), r"messages\.0\.content has image_url; expected: texts"),
    "a function's result": (asks("5", "function"), r"messages\.0: function_call is not supp"),
    "a long context": (asks("1" * 500), r"the conversation has 5\d\d tokens; expected 1 to 399"),
    "stop strings": ({"stop": ["x" * 300]}, "not be empty, or have more than 256 bytes"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected_requests_name_the_parameter(served: Served, case: str) -> None:
    options, message = REJECTED[case]
    kind = openai.NotFoundError if case == "a model" else openai.BadRequestError
    with pytest.raises(kind, match=message) as raised:
        served.client.chat.completions.create(**{"model": "policy", "messages": ASKED, **options})
    assert raised.value.body["type"] == "invalid_request_error"
    assert not served.generation.turns


def test_neutral_parameters_are_accepted(served: Served) -> None:
    options = {"n": 1, "presence_penalty": 0.0, "user": "me", "top_logprobs": 0, "response_format": {"type": "text"}}
    parts = [{"role": "developer", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+3"}]}]
    answer = served.chat(parts, "5", **options)
    assert served.tokenizer.decode(answer.prompt_token_ids) == served.rendered([{"role": "system", "content": "2+3"}])
    assert served.client.models.list().data[0].id == "policy"


def test_unknown_keys_and_paths_and_too_many_requests_are_rejected(served: Served) -> None:
    stranger = openai.OpenAI(base_url=served.server.base_url, api_key="other", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="API key is not that of an episode"):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError, match="POST /v1/responses is not served here; use /v1/chat/completions"):
        served.client.responses.create(model="policy", input="x")
    headers = {"Authorization": f"Bearer {served.episode.api_key}"}
    broken = httpx.post(f"{served.server.base_url}/chat/completions", content=b"{", headers=headers)
    assert broken.status_code == 400 and "Invalid JSON" in broken.json()["error"]["message"]
    for _ in range(LIMITS.max_turns):
        served.chat(ASKED, "x")
    with pytest.raises(openai.BadRequestError, match=r"environment\.max_turns = 5"):
        served.chat(ASKED, "x")


def test_a_client_that_goes_away_cancels_its_request(served: Served) -> None:
    with pytest.raises(openai.APITimeoutError):
        served.client.with_options(timeout=0.3).chat.completions.create(model="policy", messages=ASKED)
    (turn,) = served.generation.turns
    assert ends_within(10.0, lambda: not turn.cancelled)
    assert not served.rows(), "what no client has is not trained on"


def test_an_ended_episode_answers_its_open_requests(served: Served) -> None:
    ask = lambda: served.client.chat.completions.create(model="policy", messages=ASKED)  # noqa: E731
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        while not served.generation.turns:
            assert not asked.done(), asked.exception()
        served.episode.end("the episode has ended")
        with pytest.raises(openai.AuthenticationError, match="the episode has ended"):
            asked.result()
    assert served.generation.turns[0].cancelled
    with pytest.raises(openai.AuthenticationError, match="the episode has ended"):
        ask()


def test_an_address_that_is_taken_is_an_error(served: Served) -> None:
    other = EndpointServer("127.0.0.1", served.server.port, served.server.renderer, LIMITS, Inbox())
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1 port .*Set environment\.endpoint\.host"):
        other.start()


@pytest.mark.parametrize(("sent", "warned"), [("user: 1+2\nassistant: ", True), ("1+2", False)])
def test_a_prompt_that_the_template_renders_twice_is_warned_of(sent: str, warned: bool, caplog: Any) -> None:
    prompt = Prompt("user: 1+2\nassistant:", np.array([1, 2]), "3", "row 0", messages=[{"role": "user", "content": "1+2"}])
    answer: Future[float] = Future()
    answer.set_result(1.0)
    row = Row(f"user: {sent}\nassistant:", [1, 2], [{"role": "user", "content": sent}], [3], [-1.0], [0], [True], "stop")
    agent = SimpleNamespace(answer=answer, answers=1, rows=lambda most: EpisodeRows([row]))
    runner = MagicMock(max_conversations=1, media=None, **{"begin.return_value": agent, "inbox.take": list})
    turns = AgentTurns(runner)
    turns.start([RolloutGroup(0, 0, [Episode(prompt, 0, 4), Episode(prompt, 1, 4)])])
    assert [call.args[1]["messages"] for call in runner.begin.call_args_list] == [[{"role": "user", "content": "1+2"}]] * 2
    assert turns.take() == [] and ("the chat template renders it twice" in caplog.text) == warned
    assert len(caplog.records) == warned, "once"


def test_what_a_client_may_change_of_a_message() -> None:
    """It strips answers of the policy. Other texts and thoughts are as given, and belong to the context."""
    answer = {"role": "assistant", "content": "ab"}
    assert message_key(answer) == message_key({**answer, "content": " ab\n", "tool_calls": None, "reasoning_content": ""})
    others = [{**answer, "reasoning_content": "a"}, {"role": "user", "content": "ab"}, {"role": "user", "content": " ab"}]
    assert len({*map(message_key, [answer, *others])}) == 4
