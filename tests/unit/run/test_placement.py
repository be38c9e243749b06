"""Rows stay with the shard that computed them, and the driver carries only what it must: log-probabilities and experts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, strategies as st

from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.config.plan import RunPlan
from dagrl.data.tokenization import Prompt
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.generation import FinishedRequest, pack_generated
from dagrl.rl.rewards import Rewards
from dagrl.rl.rollout.batches import experts_field, scored_batch
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample, token_rows
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.rl.routed_experts import MISSING, ROUTED_EXPERTS, field_bytes
from dagrl.run.loops.policy_update import PolicyTrainer, input_of, split_minibatches
from dagrl.run.plans import column_phases, grpo_plans, load_phase, with_records
from dagrl.run.start import load_phases
from dagrl.runtime.phase import Phase
from dagrl.runtime.shapes import Batch, check_batch, field_types

WIDTH = 64


def configuration(size: int, shards: int) -> Config:
    policy = {"train_global_batch_size": size, "megatron_cfg": {"data_parallel_size": shards}, "generation": {}}
    return Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": policy})


def make_batch(lengths: Sequence[int]) -> Batch:
    rows = len(lengths)
    columns = dict.fromkeys(("loss_mask", "advantages", "generation_logprobs"), np.ones((rows, WIDTH), np.float32))
    ids = {"lengths": np.array(lengths, np.int64), "row_ids": 100 + np.arange(rows)}
    return Batch({"tokens": np.zeros((rows, WIDTH), np.int64), **ids, **columns})


class Recorded:
    """In place of `Replays`: what each phase was given, the row ids of each shard, and what was waited for by then."""

    shared = None

    def __init__(self, phases: Mapping[str, Phase]) -> None:
        self.phases = phases
        self.batches: list[tuple[str, Batch]] = []
        self.ids: list[tuple[str, list[set[int]]]] = []
        self.collected: list[str] = []
        self.collected_before: dict[str, list[str]] = {}

    def submit(self, name: str, batch: Batch, rows: Sequence[npt.NDArray[np.intp]]) -> None:
        self.collected_before[name] = list(self.collected)
        self.batches.append((name, batch))
        self.ids.append((name, [set(batch["row_ids"][mine].tolist()) for mine in rows]))

    def collect(self, name: str, replay: None) -> None:
        self.collected.append(name)


def step(config: Config, batch: Batch) -> Recorded:
    plan = RunPlan.of(config)
    recorded: Any = Recorded({name: load_phase(config, name) for name in column_phases(config, plan).train})
    splits = split_minibatches(config, batch)
    parts: Any = dict.fromkeys(("train", "stop", "log", "thread"))
    trainer = PolicyTrainer(config, plan, replays=recorded, media=False, **parts)
    trainer.compute_columns(batch, splits, 1)
    trainer.submit_steps(batch, 1, splits)
    return recorded  # type: ignore[no-any-return]


@given(data=st.data(), shards=st.integers(1, 3), minibatches=st.integers(1, 3), each=st.integers(1, 4))
def test_a_shard_trains_on_the_rows_that_it_computed(data: st.DataObject, shards: int, minibatches: int, each: int) -> None:
    size = shards * each
    lengths = data.draw(st.lists(st.integers(1, WIDTH), min_size=minibatches * size, max_size=minibatches * size))
    ids = step(configuration(size, shards), make_batch(lengths)).ids
    computed, trained = ([rows for name, rows in ids if name == phase] for phase in ("reference_logprobs", "train_step"))
    assert len(computed) == 1 and len(trained) == minibatches
    assert [set.union(*(rows[shard] for rows in trained)) for shard in range(shards)] == computed[0]
    assert all(len(rows) == minibatches * each for rows in computed[0]), "as many rows as its buckets have"
    assert set.union(*computed[0]) == {100 + row for row in range(len(lengths))}


def test_no_log_probability_passes_the_driver() -> None:
    """Per token it sends 36 bytes. With log-probabilities and entropy in the results and inputs of phases it would be 60.

    Only the optimizer step waits for both: a worker without its columns would leave others in a collective.
    """
    rows = 32
    recorded = step(configuration(rows, 2), make_batch([WIDTH] * rows))
    assert [name for name, _ in recorded.batches] == ["logprobs", "reference_logprobs", "train_step"]
    by_token = sum(array.itemsize for _, batch in recorded.batches for array in batch.fields.values() if array.ndim == 2)
    assert by_token == 3 * 8 + 3 * 4, "token ids three times; mask, advantages and generation's log-probabilities once"
    waits = {"logprobs": [], "reference_logprobs": [], "train_step": ["logprobs", "reference_logprobs"]}
    assert recorded.collected_before == waits


ROOT = Path(__file__).parents[3]
MODEL = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}
CONFIG = load_config(ROOT / "examples" / "grpo_quickstart.yaml", ["policy.router_replay=true"])


def made(number: int, tokens: list[int], first: int) -> FinishedRequest:
    """Returns a request of a prompt of two tokens. Its record has the ids from `first` on, of all tokens but the last."""
    count = len(tokens) + 1
    experts = (np.arange(count * 6).reshape(count, 6) + first).astype(np.uint8) % 8
    return FinishedRequest(number, tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", experts)


def episode(*requests: FinishedRequest) -> Any:
    found = Episode(Prompt("12", np.array([5, 6]), "", "row 0"), 1, 8)
    for request in requests:
        found.append(request)
    found.finish_reason = "stop"
    return found


def test_records_reach_the_phases_that_use_them() -> None:
    plain = {plan.name: plan for plan in grpo_plans(CONFIG, RunPlan.of(CONFIG))}
    plans = with_records(CONFIG, grpo_plans(CONFIG, RunPlan.of(CONFIG)), MODEL)
    phases = load_phases(CONFIG, plans)
    with_field = {name for name, phase in phases.items() if ROUTED_EXPERTS in (phase.inputs or {})}
    assert with_field == {"train_step", "logprobs", "reference_logprobs"}
    generate = next(plan for plan in plans if plan.name == "generate")
    assert generate.result_bytes >= plain["generate"].result_bytes + 128 * 16 * 6  # requests, tokens, ids of a token
    requests = [made(0, [7, 8, 9], 0), made(1, [7], 3)]
    episodes, generated = [episode(one) for one in requests], pack_generated(requests, [], 4)
    for row, one in enumerate(episodes):
        np.testing.assert_array_equal(generated.request(row).experts, one.experts)
    samples = [Sample(one.prompt, one, "") for one in episodes]
    rewards = Rewards(np.array([1.0, 0.0], np.float32), np.array([True, True]))
    group = ScoredGroup(RolloutGroup(0, 0, episodes), samples, rewards, rewards.values, np.array([True, True]))
    batch = scored_batch(algorithm_of(CONFIG), [group])
    for name, value in (("train_step", batch), ("logprobs", input_of(phases["logprobs"], batch.with_scalars(step=1)))):
        check_batch(name, value, field_types(phases[name].inputs))
    width = CONFIG.policy.max_total_sequence_length
    assert batch["tokens"].shape == (2, width), "shards would pad, and so copy, narrower rows"
    early = experts_field(episodes, CONFIG, width)
    found = field_bytes(batch[ROUTED_EXPERTS])
    np.testing.assert_array_equal(field_bytes(early[ROUTED_EXPERTS]), found)
    for row, one in enumerate(episodes):
        np.testing.assert_array_equal(found[row, : len(one.experts)], one.experts)
        assert (found[row, len(one.experts) :] == MISSING).all()
    episodes = [episode(), *episodes]  # the environment failed for the first one at its start
    found = field_bytes(experts_field(episodes, CONFIG, token_rows(episodes).tokens)[ROUTED_EXPERTS])
    assert (found[0] == MISSING).all()
    np.testing.assert_array_equal(found[1, : len(episodes[1].experts)], episodes[1].experts)


def test_a_sequence_of_two_requests_has_the_record_of_both() -> None:
    """The second request read the tokens of the first, and those of the environment between them, again."""
    one: Any = episode(made(0, [7, 8], 0))
    first, second = one.experts, made(1, [9], 5).experts
    one.answer([20, 21])
    whole = np.concatenate([second, second + 1, second + 2])[:6]  # prompt, 7, 8, 20, 21, and no record of 9
    one.append(FinishedRequest(1, [9], [-1.0], [0], "stop", whole))
    np.testing.assert_array_equal(one.experts, [*first, *whole[len(first) :]])
