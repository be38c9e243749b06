"""A refit must write every element of a parameter; parameters that vLLM has padded are rejected."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from dagrl.errors import ConfigError

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")


def test_only_vocabulary_padding_may_stay_unwritten() -> None:
    """The embedding is built without its constructor, which needs an initialized vLLM and sets nothing that is read here."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from dagrl.workers.vllm.destinations import _check_filled

    model = torch.nn.Module()
    model.add_module("linear", torch.nn.Linear(4, 12))
    embedding = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(embedding)
    model.add_module("embedding", embedding)
    tensor = torch.zeros(12, 4)
    _check_filled("linear.weight", tensor, 48, model)
    _check_filled("embedding.weight", tensor, 32, model)
    for name, described in (("linear.weight", 32), ("embedding.weight", 33), ("embedding.weight", 52)):
        with pytest.raises(ConfigError, match=rf"'{name}' has 48 elements .* layout covers {described}"):
            _check_filled(name, tensor, described, model)
