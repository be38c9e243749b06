"""Converts requests to the tokens that the policy continues, and its tokens to text and tool calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagrl.data.chat import Chat
from dagrl.data.messages import Messages
from dagrl.data.replies import reply_row
from dagrl.errors import DataError, UserError
from dagrl.rl.agents.conversations import Context, Conversations, Row, message_key
from dagrl.rl.agents.protocol import ChatBody, EndpointError, plain_messages
from dagrl.rl.media import RolloutMedia
from dagrl.rl.tools import CallParser, Calls, vllm_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from dagrl.config import Json


class Renderer:
    """Renders with a tokenizer of its own: fast tokenizers are not safe in several threads."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, parser: str, stops: Iterable[int] = (), media: RolloutMedia | None = None
    ) -> None:
        """`parser` is vLLM's name of the parser of the model's tool calls; `stops` are the tokens that end a turn. With
        `media`, requests may have images."""
        self.media = media
        self._tokenizer, self._parser, self._stops = tokenizer, parser, frozenset(stops)
        self._chat = Chat(tokenizer)
        self._parsers: dict[str, CallParser] = {}

    def read(self, body: ChatBody) -> ChatBody:
        """Returns the request with its images in the run's store. Any thread may call it."""
        if self.media is None:
            return body
        try:
            return body.model_copy(update={"messages": self.media.requested(body.messages)})
        except DataError as error:
            raise EndpointError(str(error), param="messages") from error

    def context(self, body: ChatBody, conversations: Conversations) -> Context:
        """Returns the tokens of a chat request. If it extends an answer, only the messages after it are rendered."""
        if self._tokenizer.chat_template is None:
            raise EndpointError("the tokenizer has no chat template; set policy.tokenizer.chat_template")
        messages, tools, options = plain_messages(body.messages), body.offered_tools, body.chat_template_kwargs
        keys = (json.dumps([tools, options], sort_keys=True), *map(message_key, messages))
        after = conversations.extended_by(keys)
        if after is None and tools and (end := self._chat.of(tools).stop_before_calls(tools)):
            raise EndpointError(
                f"the chat template writes {end!r}, with which generation stops, before the calls of a turn, so the policy "
                "could make none; use one that ends turns after their calls (policy.tokenizer.chat_template)",
                param="tools",
            )
        media: Sequence[int] = ()
        try:
            if after is None:
                text = self._chat.render(messages, tools, opened=True, **options)
                if self.media is None:
                    tokens = self._chat.encoder.ids(text)
                else:
                    shown = self.media.media_of(messages)
                    text, tokens, row = self.media.processor.row(text, shown, self._chat.encoder, "the conversation")
                    media = () if row is None else row.tokens.tolist()
            else:
                text = self._text(messages, tools, options)
                count = len(after.messages) - 1  # without the key of the tools and options
                turn, before, new = [*after.result.tokens], messages[:count], messages[count:]
                images = None if self.media is None else self.media.images(new)
                tokens, standing = reply_row(
                    self._chat, turn, self._stops, new, tools, sys.maxsize, before, images, **options
                )
                media = standing.tolist()
        except UserError as error:
            raise EndpointError(str(error), param="messages") from error
        except Exception as error:  # Jinja's errors, and those that templates raise
            raise EndpointError(f"the chat template rejects the conversation: {error}", param="messages") from error
        return Context(after, tokens, text, keys, messages, media)

    def _text(self, messages: Messages, tools: Sequence[Json], options: Mapping[str, Any]) -> str:
        """Returns the template's text of a conversation; empty if it rejects what the policy wrote."""
        try:
            text = self._chat.render(messages, tools, opened=True, **options)
            if self.media is not None:
                text = self.media.processor.expand(text, self.media.media_of(messages), "the conversation").text
            return text
        except Exception:  # Jinja's errors, and those that templates raise
            return ""

    def renders_again(self, row: Row) -> bool:
        """Returns whether the template's text of a conversation, up to its last answer, has the tokens of the row."""
        tokens = [*row.prompt, *row.tokens]
        before = [] if self.media is None else self.media.processor.before(row.rendered, self._chat.encoder)
        return [*before, *self._chat.encoder.ids(row.rendered)] == tokens[: len(tokens) - row.answer]

    def text(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Returns the text of a sampled turn without its end, and without special tokens unless `special`."""
        return self._chat.turn_text(list(tokens), special=special)

    def token_text(self, token: int) -> str:
        """Returns the text of one token."""
        return str(self._tokenizer.decode([token]))

    def parse_calls(self, body: ChatBody, text: str) -> Calls:
        """Splits a turn, with special tokens, into its text and its tool calls. The first one with some tools imports vLLM,
        for seconds."""
        key = json.dumps(body.offered_tools)
        if key not in self._parsers:
            self._parsers[key] = vllm_parser(key, self._parser, self._tokenizer)
        return self._parsers[key](text)
