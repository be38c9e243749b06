"""Converts requests to the tokens that the policy continues, and its tokens to text and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dagrl.rl.agents.conversations import Context, Conversations, message_key
from dagrl.rl.agents.protocol import ChatBody, EndpointError, plain_messages
from dagrl.rl.environments import reply_text
from dagrl.rl.tools import CallParser, Calls, vllm_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Renderer:
    """Renders with a tokenizer of its own: fast tokenizers are not safe in several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, parser: str) -> None:
        """`parser` is vLLM's name of the parser of the model's tool calls."""
        self._tokenizer, self._parser = tokenizer, parser
        self._parsers: dict[str, CallParser] = {}

    def context(self, body: ChatBody, conversations: Conversations) -> Context:
        """Returns the tokens of a chat request. If it extends an answer, only the messages after it are rendered."""
        if self._tokenizer.chat_template is None:
            raise EndpointError("the tokenizer has no chat template; set policy.tokenizer.chat_template")
        messages, options = plain_messages(body.messages), body.chat_template_kwargs
        setting = json.dumps([body.offered_tools, options], sort_keys=True)
        keys = (setting, *map(message_key, messages))
        after = conversations.extended_by(keys)
        try:
            if after is not None:
                closed = list(after.result.tokens[-1:]) == [self._tokenizer.eos_token_id]
                text = reply_text(self._tokenizer, messages[len(after.messages) - 1 :], closed=closed, **options)
            else:
                tools = body.offered_tools or None
                template = self._tokenizer.apply_chat_template
                text = str(template(messages, tools, tokenize=False, add_generation_prompt=True, **options))
        except Exception as error:  # Jinja's errors, and those that templates raise
            raise EndpointError(f"the chat template rejects the conversation: {error}", param="messages") from error
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return Context(after, tokens, text, keys, messages)

    def text(self, tokens: Iterable[int]) -> str:
        """Returns the text of sampled tokens, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """Returns the text of one token."""
        return str(self._tokenizer.decode([token]))

    def parse_calls(self, body: ChatBody, text: str) -> Calls:
        """Splits a turn into its text and its tool calls. The first one with some tools imports vLLM, for seconds."""
        key = json.dumps(body.offered_tools)
        if key not in self._parsers:
            self._parsers[key] = vllm_parser(key, self._parser, self._tokenizer)
        return self._parsers[key](text)
