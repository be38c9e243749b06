"""Outputs of bursts: steps that were replayed as graphs join like steps of vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dagrl.workers.vllm.bursts import _joined


class Logprobs(NamedTuple):
    """The fields of vLLM's `LogprobsLists`."""

    logprob_token_ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]
    sampled_token_ranks: np.ndarray[Any, Any]
    cu_num_generated_tokens: list[int] | None = None


@dataclass
class Output:
    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: Logprobs | None


class Replayed:
    def __init__(self, *arrays: np.ndarray[Any, Any]) -> None:
        self._arrays = list(arrays)

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        return self._arrays


def test_replayed_steps_join_like_others() -> None:
    tokens, ranks = np.arange(12).reshape(4, 3) * 7, np.arange(12).reshape(4, 3) + 1
    logprobs = (-np.arange(12) / 8).astype(np.float32).reshape(4, 3)
    steps: list[Any] = [
        Output(["a", "b", "c"], row[:, None].tolist(), Logprobs(row[:, None], logprobs[step][:, None], ranks[step]))
        for step, row in enumerate(tokens)
    ]
    found: Any = _joined(steps[:1], Replayed(tokens[1:], logprobs[1:], ranks[1:]))  # type: ignore[arg-type]
    expected: Any = _joined(steps, None)
    assert found.sampled_token_ids == expected.sampled_token_ids == tokens.T.tolist()
    assert found.logprobs.cu_num_generated_tokens == [0, 4, 8, 12] == expected.logprobs.cu_num_generated_tokens
    for name in ("logprob_token_ids", "logprobs", "sampled_token_ranks"):
        assert getattr(found.logprobs, name).tolist() == getattr(expected.logprobs, name).tolist()
    assert found.logprobs.logprobs[:, 0].tolist() == logprobs.T.ravel().tolist()
