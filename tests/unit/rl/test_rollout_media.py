"""Images that environments and agents send: conversations have the tokens of the model's own processor.

Truth: `processor.apply_chat_template` of the finished conversation with the images themselves.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from dagrl.config import Config, EnvironmentConfig, ImagesConfig
from dagrl.data.chat import chat_of
from dagrl.data.media import IMAGE, MediaProcessor, MediaStore, Medium, RowMedia, id_of, ids_in
from dagrl.data.tokenization import Prompt
from dagrl.rl.environments import EnvironmentRunner, Question, Step
from dagrl.rl.generation import FinishedRequest
from dagrl.rl.media import RolloutMedia
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, token_rows
from dagrl.rl.rollout.turns import EnvironmentTurns, set_conversations
from dagrl.rl.tools import Call, Calls
from tests.unit.data.processors import FAMILIES, Family, processor_of
from tests.unit.data.test_media import ANSWER, QUESTION, SIZES, at_url, data_url, image, picture, png, text, truth
from tests.unit.rl.test_agent_endpoint import ScriptedGeneration, Served, Turn

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [image(0), text(QUESTION)]},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": [text("and "), image(2), text("a\n\n"), image(2)]},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": [image(1)]},
]
"""The first message is what `reset` gives; then the environment answers each turn."""


def sent(message: dict[str, Any], kinds: Iterator[str]) -> dict[str, Any]:
    """Returns a message with its images in the ways that environments may send them."""
    parts: list[dict[str, Any]] = []
    for part in message["content"]:
        if part["type"] == "text":
            parts.append(part)
            continue
        number, kind = int(part["image"][len("images/")]), next(kinds)
        forms = {"pillow": picture(number), "bytes": png(number)}
        parts.append(at_url(data_url(number)) if kind == "url" else {**IMAGE, "image": forms[kind]})
    return {**message, "content": parts}


class Screens:
    """Shows an image at the start and after each action."""

    def reset(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        self._kinds = iter(("pillow", "url", "bytes", "pillow"))
        self._replies = iter([CONVERSATION[2], CONVERSATION[4]])
        return [sent(CONVERSATION[0], self._kinds)]

    def step(self, completion: str) -> Step:
        reply = next(self._replies, None)
        return Step(reply and [sent(reply, self._kinds)], reward=1.0)


class Broken:
    def reset(self, example: dict[str, Any]) -> None:
        return None

    def step(self, completion: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{**IMAGE, "image": b"no image"}]}]


POLICY = {"max_total_sequence_length": 4096, "generation": {"max_new_tokens": 64, "stop_token_ids": []}}
CONFIG = Config.model_validate({"name": "run", "algorithm": "grpo", "data": {}, "policy": POLICY})


def media_in(directory: Path, family: Family, **limits: Any) -> RolloutMedia:
    store = MediaStore(directory / "media", ImagesConfig(**limits))
    return RolloutMedia(MediaProcessor(processor_of(family)), store)


def sampled(family: Family, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Returns the tokens of the last turn as they are generated: up to the token that ends it."""
    before = truth(family, messages[:-1], opened=True)["input_ids"]
    turn = truth(family, messages)["input_ids"][len(before) :]
    (end,) = processor_of(family).tokenizer.convert_tokens_to_ids([family.kind.end])
    return turn[: turn.index(end) + 1]


def play(settings: EnvironmentConfig | str, media: RolloutMedia, prompt: Prompt, turns: Sequence[Sequence[int]]) -> Episode:
    """Plays an episode with these turns of the policy, in an environment of this file or in a configured one."""
    tokenizer = media.processor.tokenizer
    if isinstance(settings, str):
        settings = EnvironmentConfig(function=f"{__name__}:{settings}", max_turns=9)
    group = RolloutGroup(0, 0, [Episode(prompt, 0, 64)])
    (episode,) = group.episodes
    with EnvironmentRunner(settings, tokenizer, media) as environment:
        source = EnvironmentTurns(CONFIG, tokenizer, environment, media)
        ready = source.start([group])
        for turn in [*turns, None]:
            while not ready and not episode.finish_reason:
                wait(source.awaited)
                ready = source.take()
            if turn is None or episode.finish_reason:
                break
            ready = []
            result = FinishedRequest(0, list(turn), [-1.0] * len(turn), [0] * len(turn), "stop")
            episode.append(result)
            episode.turns += 1
            source.finish([((group, episode), result)])
        source.abort(group)
    return episode


def check_images(family: Family, episode: Episode, numbers: Sequence[int], store: MediaStore) -> None:
    """Checks that the tokens that stand for images are exactly the processor's, and the images those of `numbers`."""
    batch = token_rows([episode], media=True)
    standing = np.isin(batch["tokens"][0], processor_of(family).image_token_ids)
    np.testing.assert_array_equal(batch["media"][0] != 0, standing)
    assert ids_in(batch["media"][0]) == episode.media_ids and len(episode.media_ids) == len(numbers)
    for medium, number in zip(episode.media_ids, numbers, strict=True):
        np.testing.assert_array_equal(np.asarray(store.open(medium)), np.asarray(picture(number)))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_screen_after_each_action_has_the_tokens_of_the_processor(family: Family, tmp_path: Path) -> None:
    media = media_in(tmp_path, family)
    prompt = Prompt("", np.array([1]), "", "row 0", messages=[{"role": "user", "content": "replaced"}])
    turns = [sampled(family, CONVERSATION[:count]) for count in (2, 4)]
    episode = play("Screens", media, prompt, [*turns, turns[0]])
    assert episode.failure == ""
    expected = truth(family, CONVERSATION, opened=True)["input_ids"]
    assert [*episode.prompt.tokens.tolist(), *episode.tokens.tolist()] == [*expected, *turns[0]]
    check_images(family, episode, [0, 2, 2, 1], media.store)
    spaced = "Idefics3" in family.name  # its template puts a space before a turn's text, which the policy samples
    assert episode.renders_again is not spaced and episode.turn_rewards == [1.0] * 3
    assert (episode.media[episode.sampled] == 0).all()


@pytest.mark.usefixtures("in_process")
def test_replies_with_broken_images_fail_their_sequence(tmp_path: Path) -> None:
    family = FAMILIES[0]
    asked = [{"role": "user", "content": QUESTION}]
    (turn,) = [sampled(family, [*asked, CONVERSATION[1]])]
    prompt = Prompt("", np.array(truth(family, asked, opened=True)["input_ids"]), "", "row 0", messages=asked)
    broken = play("Broken", media_in(tmp_path, family), prompt, [turn])
    assert "the reply, message 1, image 1: 8 bytes: not an image that Pillow can read" in broken.failure
    assert broken.finish_reason == "environment_failed"


@pytest.mark.usefixtures("in_process")
def test_images_of_replies_need_a_run_with_images() -> None:
    settings = EnvironmentConfig(function=f"{__name__}:Broken")
    question = Question("0", Prompt("", np.array([1]), "", "row 0"), 0, ["turn"], 0)
    with EnvironmentRunner(settings, processor_of(FAMILIES[0]).tokenizer) as environment:
        (reply,) = environment.submit(0, [question]).result()
    assert reply.content is None and "set data.images.enabled=true" in reply.failure


def screenshot(number: int) -> Any:
    """Takes a screenshot.

    Args:
        number: of the image; that of 2 comes with a text
    """
    return picture(number) if number != 2 else [text("and "), {**IMAGE, "image": png(2)}]


@pytest.mark.usefixtures("in_process")
def test_images_of_tools_have_the_tokens_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([[1], [2, 0], []])

    def parse(turn: str) -> Calls:
        return Calls(turn, [Call("screenshot", f'{{"number": {number}}}') for number in next(calls)])

    monkeypatch.setattr("dagrl.rl.tools._call_parser", lambda *_: parse)
    family, media = FAMILIES[0], media_in(tmp_path, FAMILIES[0])
    asked, answer = [{"role": "user", "content": [image(0), text(QUESTION)]}], {"role": "assistant", "content": ANSWER}
    contents = [image(1)], [text("and "), image(2)], [image(0)]
    shown = [{"role": "tool", "content": content} for content in contents]
    whole = [*asked, answer, shown[0], answer, *shown[1:]]
    medium = Medium(png(0), id_of(png(0)), SIZES[0])
    media.store.add([medium])
    tokens = np.array(truth(family, asked, opened=True)["input_ids"])
    standing = np.where(np.isin(tokens, processor_of(family).image_token_ids), medium.id, 0)
    standing[np.flatnonzero(standing)[0]] *= -1
    messages = [{"role": "user", "content": [IMAGE, text(QUESTION)]}]
    prompt = Prompt("", tokens, "", "row 0", messages=messages, media=RowMedia((medium,), standing))
    turn = sampled(family, [*asked, answer])
    settings = EnvironmentConfig(tools=[f"{__name__}:screenshot"], tool_parser="hermes", max_turns=9)
    episode = play(settings, media, prompt, [turn] * 3)
    assert episode.failure == ""
    assert [*tokens.tolist(), *episode.tokens.tolist()] == [*truth(family, whole, opened=True)["input_ids"], *turn]
    check_images(family, episode, [0, 1, 2, 0], media.store)


class Says(ScriptedGeneration):
    def _say(self, turn: Turn, text: str) -> None:
        end = chat_of(self._tokenizer).end.tokens[0]
        tokens = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], end]
        turn.finish(FinishedRequest(0, tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop"))


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr("platform._Processor.get", str)
    media = media_in(tmp_path, FAMILIES[0])
    served = Served(media.processor.tokenizer, media, Says)
    yield served
    served.close()


def parts(message: dict[str, Any], *urls: str) -> dict[str, Any]:
    """Returns a message in OpenAI's format, with the images at `urls`."""
    images = ({"type": "image_url", "image_url": {"url": one, "detail": "high"}} for one in urls)
    return {**message, "content": [next(images) if part["type"] == "image" else part for part in message["content"]]}


def test_requests_take_data_urls_and_the_examples_files_by_openais_client(served: Served) -> None:
    """A longer request continues an answer's tokens; its images may come by another URL than before."""
    family, store = FAMILIES[0], served.server.renderer.media.store  # type: ignore[union-attr]
    store.add(Medium(png(number), id_of(png(number)), SIZES[number]) for number in (1, 2))
    one, two = (store.path(id_of(png(number))).as_uri() for number in (1, 2))  # as in the example that an agent gets
    messages = [parts(CONVERSATION[0], data_url(0))]
    first = served.chat(messages, ANSWER)
    assert first.choices[0].message.content == ANSWER
    assert first.prompt_token_ids == truth(family, CONVERSATION[:1], opened=True)["input_ids"]
    answer = {"role": "assistant", "content": ANSWER}
    messages = [parts(CONVERSATION[0], data_url(0)), answer, parts(CONVERSATION[2], two, data_url(2))]
    second = served.chat(messages, "hello")
    assert second.prompt_token_ids == truth(family, CONVERSATION[:3], opened=True)["input_ids"]
    messages += [{"role": "assistant", "content": "hello"}, parts(CONVERSATION[4], one)]
    third = served.chat(messages, "it")
    assert third.prompt_token_ids == truth(family, CONVERSATION, opened=True)["input_ids"]
    rows = served.episode.rows(9)
    (row,) = rows.rows
    assert served.server.renderer.renders_again(row)
    episode = Episode(Prompt("", np.array([1]), "", "row 0"), 0, 64)
    set_conversations(episode, rows, {})
    check_images(family, episode, [0, 2, 2, 1], store)


@pytest.mark.parametrize("given", ["https://example.com/1.png", "file:///etc/passwd", "a.png", "data:image/png;base64,AAAA"])
def test_other_images_are_refused(given: str, served: Served) -> None:
    expected = "that Pillow can read" if given.startswith("data") else r"expected: a data URL, .* No other file is read"
    with pytest.raises(openai.BadRequestError, match=expected) as caught:
        served.chat([parts(CONVERSATION[0], given)], ANSWER)
    assert caught.value.param == "messages"


def test_examples_have_the_urls_of_their_images(tmp_path: Path) -> None:
    media = media_in(tmp_path, FAMILIES[0])
    medium = Medium(png(0), id_of(png(0)), SIZES[0])
    media.store.add([medium])
    row = RowMedia((medium,), np.array([0, -medium.id, medium.id]))
    prompt = Prompt("", np.array([1, 2, 2]), "", "row 0", messages=[{"role": "user", "content": [IMAGE, text(QUESTION)]}])
    (message,) = media.shown(replace(prompt, media=row))
    (part, _) = message["content"]
    assert Path(part["image_url"]["url"].removeprefix("file://")).read_bytes() == png(0)
    (again,) = media.requested([message])
    assert media.media_of([again]) == [replace(medium, data=media.store.path(medium.id))]
