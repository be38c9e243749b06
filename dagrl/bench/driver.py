"""The driver's own work in a GRPO step, with engines that answer at once: `pytest dagrl/bench/bench_step.py -k driver`.

    step = DriverStep(samples=1024, prompt=120, completion=256)
    groups = step.generate()              # requests to engines, finished sequences back
    scored = step.score(groups)           # texts and rewards
    batch = step.batch(scored)            # rows of a training batch
    step.keep(scored, batch, directory)   # the file in `rollouts/`, which a run writes in a thread

Prompts, configuration and code are those of a run; tokens are random.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dagrl.config import Config
from dagrl.data.tokenization import Prompt
from dagrl.errors import WorkerError
from dagrl.rl.generation import FinishedRequest, Generated, pack_generated
from dagrl.rl.rewards import Rewards
from dagrl.rl.rollout.batches import scored_batch
from dagrl.rl.rollout.engines import QuantumResult
from dagrl.rl.rollout.episodes import RolloutGroup, new_group, request_seeds, samples_of
from dagrl.rl.rollout.record import TokenTexts, rollout_rows
from dagrl.rl.rollout.rollouts import Rollouts
from dagrl.rl.rollout.scoring import ScoredGroup, scored_group
from dagrl.run.model import character_tokenizer
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.rollouts import RolloutFiles

GROUP = 8
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=() "


@dataclass(frozen=True)
class _Done:
    """A quantum that has ended."""

    found: QuantumResult

    def result(self) -> QuantumResult:
        return self.found

    def partial(self) -> Mapping[int, Generated]:
        return {}


class ReadyEngines:
    """Engines that hold the answers to all requests: `completions` [samples, tokens] and their log-probabilities.

    An answer is packed once, because in a run the workers pack it.
    """

    shards, changing, ready, unconnected = 1, False, True, False

    def __init__(self, completions: npt.NDArray[np.int64]) -> None:
        self._tokens = completions.tolist()
        self._logprobs = np.full(completions.shape, -0.5).tolist()
        self._packed: dict[tuple[int, ...], Generated] = {}

    def submit(self, requests: Batch, rows: Sequence[npt.NDArray[np.intp]]) -> _Done:
        """Answers the requests of one shard."""
        ids = tuple(requests["request_ids"].tolist())
        if ids not in self._packed:
            self._packed[ids] = self._pack(ids)
        return _Done(QuantumResult([self._packed[ids]], [1.0], 0.0))

    def _pack(self, ids: Sequence[int]) -> Generated:
        length = len(self._tokens[0])
        made = [FinishedRequest(one, self._tokens[one], self._logprobs[one], [0] * length, "length") for one in ids]
        return pack_generated(made, [], length)

    def unfinished(self) -> Mapping[int, FinishedRequest]:
        """Nothing runs."""
        return {}

    def replace(self, error: WorkerError) -> set[int] | None:
        """No engine fails."""
        raise error

    def _nothing(self, *args: object, **kwargs: object) -> None:
        """No request runs, and no engine waits, starts, leaves or joins."""

    abort = exclude_wait = take_change = refill = connect = _nothing


class DriverStep:
    """See the module's docstring."""

    def __init__(self, samples: int, prompt: int, completion: int) -> None:
        generation = {"max_new_tokens": completion, "vllm_cfg": {"max_num_seqs": samples}}
        policy = {"max_total_sequence_length": prompt + completion, "generation": generation}
        grpo = {"num_prompts_per_step": samples // GROUP, "num_generations_per_prompt": GROUP}
        values = {"name": "driver", "algorithm": "grpo", "data": {}, "policy": policy, "grpo": grpo}
        self._config = Config.model_validate(values)
        self._tokenizer = character_tokenizer(CHARACTERS)
        draw = np.random.default_rng(0)
        tokens = draw.integers(4, len(CHARACTERS), (samples // GROUP, prompt))
        self._prompts = [Prompt("1", one, "0", f"prompt {number}") for number, one in enumerate(tokens)]
        self._engines = ReadyEngines(draw.integers(4, len(CHARACTERS), (samples, completion)))
        self._texts = TokenTexts(self._tokenizer)

    def generate(self) -> list[RolloutGroup]:
        """Sends requests for all samples and takes the sequences."""
        rollouts = Rollouts(self._config, self._engines, self._tokenizer)
        seeds = [request_seeds(0, number, GROUP) for number in range(len(self._prompts))]
        groups = zip(self._prompts, seeds, strict=True)
        rollouts.start(*(new_group(self._config, at, at, prompt, own) for at, (prompt, own) in enumerate(groups)))
        found: list[RolloutGroup] = []
        while rollouts.busy:
            found += rollouts.advance()
        return found

    def score(self, groups: Sequence[RolloutGroup]) -> list[ScoredGroup]:
        """Decodes the texts and gives alternating rewards, in place of the reward's processes."""
        rewards = Rewards(np.arange(GROUP, dtype=np.float32) % 2, np.ones(GROUP, np.bool_))
        return [scored_group(self._config, group, samples_of(self._tokenizer, group), rewards) for group in groups]

    def batch(self, scored: Sequence[ScoredGroup]) -> Batch:
        """Returns the training batch."""
        return scored_batch(self._config, scored, 1)

    def keep(self, scored: Sequence[ScoredGroup], batch: Batch, directory: Path | None = None) -> None:
        """Writes the file of rollouts, by default to a temporary directory."""
        with tempfile.TemporaryDirectory() as temporary:
            files = RolloutFiles(directory or Path(temporary) / "rollouts", max_bytes=None)
            files.write(1, rollout_rows(scored, batch, {}, 1, self._texts))
