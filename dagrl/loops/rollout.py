"""Generation for a loop: requests go in with the first quantum, and quanta are replayed until the last has finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dagrl.generation import FinishedRequest, Generated
from dagrl.loops.session import Session
from dagrl.shapes import Batch
from dagrl.tokenization import Prompt


@dataclass(frozen=True)
class Sample:
    """A prompt and one completion of it."""

    prompt: Prompt
    completion: FinishedRequest
    text: str

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion.tokens)


def rollout(session: Session, prompts: Sequence[Prompt], generations: int, stream: int) -> list[Sample]:
    """`generations` completions of each prompt, prompt by prompt.

    `stream` tells rollouts of a run apart: a request's seed depends on the run's seed, the stream and its place alone, so
    that a resumed run draws the same tokens.
    """
    waiting = _requests(session, prompts, generations, stream)
    count, finished = waiting.rows, dict[int, FinishedRequest]()
    while len(finished) < count:
        quanta: Sequence[Generated] = session.replay("generate", waiting)
        waiting = waiting.select([])
        for quantum in quanta:
            finished |= {quantum.request(row).request_id: quantum.request(row) for row in range(len(quantum))}
        session.stop.check()
    completions = [finished[request] for request in range(count)]
    texts = session.inputs.tokenizer.batch_decode([done.tokens for done in completions], skip_special_tokens=True)
    return [
        Sample(prompts[request // generations], completion, text)
        for request, (completion, text) in enumerate(zip(completions, texts, strict=True))
    ]


def _requests(session: Session, prompts: Sequence[Prompt], generations: int, stream: int) -> Batch:
    """One row a request, with ids from 0."""
    generation = session.config.policy.generation
    assert generation is not None
    rows = len(prompts) * generations
    width = max(len(prompt) for prompt in prompts)
    tokens = np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt.tokens
    return Batch(
        {
            "tokens": np.repeat(tokens, generations, axis=0),
            "lengths": np.repeat(np.array([len(prompt) for prompt in prompts], np.int64), generations),
            "request_ids": np.arange(rows, dtype=np.int64),
            "seeds": request_seeds(session.config.seed, stream, rows),
            "max_new_tokens": np.full(rows, generation.max_new_tokens, np.int64),
            "greedy": np.zeros(rows, np.int64),
        }
    )


def request_seeds(seed: int, stream: int, count: int) -> npt.NDArray[np.int64]:
    """Seeds [count] of the requests of one rollout."""
    return np.random.default_rng((seed, stream)).integers(0, 2**31 - 1, count, dtype=np.int64)
