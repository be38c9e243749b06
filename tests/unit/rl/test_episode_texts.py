"""Texts and spans of episodes against transformers' own decoding and a plain search."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dagrl.data.tokenization import Prompt
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, samples_of

PROMPT = Prompt("x", np.array([1]), "", "row 0")


@pytest.mark.parametrize("cleans", [False, True])
def test_texts_are_those_of_transformers(cleans: bool) -> None:
    special = {"eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), "do", "n't", ".", "1", "é"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, words[1]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special, clean_up_tokenization_spaces=cleans)
    episodes = [Episode(PROMPT, 0, 8, tokens) for tokens in ([2, 3, 4, 0], [], [5, 6])]
    groups = [RolloutGroup(number, 0, part) for number, part in enumerate((episodes[:2], episodes[2:]))]
    found = [sample.text for sample in samples_of(tokenizer, *groups)]
    assert found == [tokenizer.decode(episode.tokens, skip_special_tokens=True) for episode in episodes]
    assert samples_of(tokenizer) == []
    assert found[0] == ("don't." if cleans else "do n't .")


@pytest.mark.parametrize("sampled", [[], [True], [True] * 5, [False, True], [True, False, False, True]])
def test_spans_are_of_turns(sampled: list[bool]) -> None:
    versions = list(range(len(sampled)))
    episode = Episode(PROMPT, 0, 8, versions, [0.0] * len(sampled), versions, sampled)
    runs = [list(run) for _, run in groupby(versions, lambda at: sampled[at])]
    assert episode.spans() == [(run[0], run[-1] + 1) for run in runs]
