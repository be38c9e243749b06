"""Router replay on the driver: the record of each token's experts in the phases, and in the batches that they replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dagrl.config.file import load_config
from dagrl.config.plan import RunPlan
from dagrl.data.tokenization import Prompt
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.generation import FinishedRequest, pack_generated
from dagrl.rl.rewards import Rewards
from dagrl.rl.rollout.batches import scored_batch, with_experts
from dagrl.rl.rollout.episodes import Episode, RolloutGroup, Sample, token_rows
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.rl.routed_experts import MISSING, ROUTED_EXPERTS, field_bytes
from dagrl.run.loops.policy_update import input_of
from dagrl.run.plans import grpo_plans, with_records
from dagrl.run.start import load_phases
from dagrl.runtime.shapes import check_batch, field_types

ROOT = Path(__file__).parents[3]
MODEL = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}
CONFIG = load_config(ROOT / "examples" / "grpo_quickstart.yaml", ["policy.router_replay=true"])


def made(number: int, tokens: list[int], first: int) -> FinishedRequest:
    """Returns a request of a prompt of two tokens. Its record has the ids from `first` on, of all tokens but the last."""
    count = len(tokens) + 1
    experts = (np.arange(count * 6).reshape(count, 6) + first).astype(np.uint8) % 8
    return FinishedRequest(number, tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", experts)


def episode(*requests: FinishedRequest) -> Episode:
    prompt = Prompt("12", np.array([5, 6]), "", "row 0")
    found = Episode(prompt, 1, 8)
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
    assert generate.result_bytes is not None and plain["generate"].result_bytes is not None
    assert generate.result_bytes >= plain["generate"].result_bytes + 128 * 16 * 6  # requests, tokens, ids of a token

    episodes = [episode(made(0, [7, 8, 9], 0)), episode(made(1, [7], 3))]
    generated = pack_generated([made(0, [7, 8, 9], 0), made(1, [7], 3)], [], 4)
    for row, one in enumerate(episodes):
        experts = generated.request(row).experts
        assert experts is not None and one.experts is not None
        np.testing.assert_array_equal(experts, one.experts)
    samples = [Sample(one.prompt, one, "") for one in episodes]
    rewards = Rewards(np.array([1.0, 0.0], np.float32), np.array([True, True]))
    group = ScoredGroup(RolloutGroup(0, 0, episodes), samples, rewards, rewards.values, np.array([True, True]))
    batch = scored_batch(algorithm_of(CONFIG), [group], 1)
    assert phases["train_step"].inputs is not None and phases["logprobs"].inputs is not None
    check_batch("train_step", batch, field_types(phases["train_step"].inputs))
    check_batch("logprobs", input_of(phases["logprobs"], batch.with_scalars(step=1)), field_types(phases["logprobs"].inputs))
    early = with_experts(CONFIG, token_rows(episodes), episodes)
    found = field_bytes(batch[ROUTED_EXPERTS])
    np.testing.assert_array_equal(field_bytes(early[ROUTED_EXPERTS]), found)
    for row, one in enumerate(episodes):
        assert one.experts is not None
        np.testing.assert_array_equal(found[row, : len(one.experts)], one.experts)
        assert (found[row, len(one.experts) :] == MISSING).all()


def test_a_sequence_that_the_environment_failed_for_at_its_start_has_no_record() -> None:
    episodes = [episode(), episode(made(0, [7, 8], 0))]
    found = field_bytes(with_experts(CONFIG, token_rows(episodes), episodes)[ROUTED_EXPERTS])
    assert (found[0] == MISSING).all()
    np.testing.assert_array_equal(found[1, :3], episodes[1].experts)


def test_a_sequence_of_two_requests_has_the_record_of_both() -> None:
    """The second request read the tokens of the first, and those of the environment between them, again."""
    one = episode(made(0, [7, 8], 0))
    first = one.experts
    one.answer([20, 21])
    second = made(1, [9], 5).experts
    assert first is not None and second is not None
    whole = np.concatenate([second, second + 1, second + 2])[:6]  # prompt, 7, 8, 20, 21, and no record of 9
    one.append(FinishedRequest(1, [9], [-1.0], [0], "stop", whole))
    assert one.experts is not None
    np.testing.assert_array_equal(one.experts, [*first, *whole[len(first) :]])
    one.take_back(2)
    assert len(one.experts) == 5
