"""An agent with the real OpenAI client against real vLLM workers, while GRPO changes the weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from dagrl.config.file import load_config
from dagrl.rl.rollout.episodes import Episode
from dagrl.run.train import train
from dagrl.telemetry.rollouts import read_rollouts, rollout_files
from tests.integration.agent_task import NOTES
from tests.integration.main_job import GRPO, ROOT, steps_of
from tests.integration.test_async_grpo import Trained, numbers_of, trained
from tests.integration.test_async_job import OVERRIDES, PROMPTS

__all__ = ["trained"]  # a fixture

STEPS, AGE = 3, 1
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
AGENT = (
    f"grpo.max_num_steps={STEPS}",
    "grpo.async_grpo.in_flight_weight_updates=true",
    f"grpo.async_grpo.max_trajectory_age_steps={AGE}",
    "policy.generation.forced_lengths=null",
    "policy.generation.max_new_tokens=10",
    "policy.generation.vllm_cfg.max_num_seqs=8",
    "environment.agent=tests.integration.agent_task:adds_twice",
    "environment.max_conversations=2",
    "reward={function: null, weights: {sevens: 1.0, asked: 0.5}}",
)


@pytest.mark.slow
@pytest.mark.usefixtures("one_cluster")
def test_trained_tokens_are_those_that_the_agent_got(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("openai")
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    overrides = [
        *OVERRIDES,
        *AGENT,
        f"policy.tokenizer.chat_template={json.dumps(TEMPLATE)}",
        f"output_dir={tmp_path}",
        "name=agents",
    ]
    config = load_config(ROOT / GRPO, overrides)
    train(config)
    assert sorted(numbers_of(trained)) == list(range(STEPS * PROMPTS))
    notes = {(note := json.loads(line))["seed"]: note["answers"] for line in (tmp_path / "notes").open()}
    seen = set[int]()
    for version, batch in enumerate(trained):
        for sample in (sample for group in batch for sample in group.samples):
            answers = notes[sample.completion.seed]
            longer, shorter = sample.rows
            check_row(longer, answers[:3])
            check_row(shorter, answers[3:])
            made = {made for row in sample.rows for made in row.versions}
            assert version - AGE <= min(made) and max(made) <= version
            seen |= made
            assert sample.completion.reward_parts["sevens"] == sum(item["text"].count("7") for item in answers)
    assert len(seen) > 1, "weights changed while agents ran"
    for line, batch in zip(steps_of(config), trained, strict=True):
        assert line["reward/parts/asked"] == 1.0 and line["environment/failures"] == 0
        assert (line["environment/conversations"], line["environment/untrained_tokens"]) == (2.0, 0.0)
        rewards = [value for group in batch for value in group.rewards.values]
        expected = [0.5 + sample.completion.reward_parts["sevens"] for group in batch for sample in group.samples]
        assert rewards == expected
        for row in read_rollouts(rollout_files(Path(config.output_dir) / config.name / "rollouts")[line["step"]]):
            (shorter_row,) = row["conversations"]
            assert shorter_row["trained"] and len(shorter_row["train_logprobs"]) == len(shorter_row["tokens"])
            assert shorter_row["prompt"] == "2+2="
        learned = sum(sum(row.sampled) for group in batch for sample in group.samples for row in sample.rows)
        assert line["valid_tokens"] == learned


def check_row(row: Episode, answers: list[dict[str, Any]]) -> None:
    """Checks that the tokens in the loss are those of the answers, each in the context that it was given."""
    whole = [*row.prompt.tokens.tolist(), *row.tokens]
    sampled = [place for place, in_loss in enumerate(row.sampled) if in_loss]
    assert [row.tokens[place] for place in sampled] == [token for item in answers for token in item["tokens"]]
    assert [row.logprobs[place] for place in sampled] == [logprob for item in answers for logprob in item["logprobs"]]
    assert sorted({row.versions[place] for place in sampled}) == sorted({v for item in answers for v in item["versions"]})
    done = 0
    for item in answers:
        begin = len(row.prompt) + sampled[done]
        assert item["prompt"] == whole[:begin]
        done += len(item["tokens"])
