"""What a reward function can ask for about a sample, by the names of its parameters (`dagrl.rl.rewards.GIVEN`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dagrl.rl.rollout.episodes import RolloutGroup, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def reward_texts(samples: Sequence[Sample]) -> tuple[list[str], list[str], list[str]]:
    """Returns the positional arguments of reward functions: prompts, completions and references."""
    return (
        [sample.prompt.text for sample in samples],
        [sample.text for sample in samples],
        [sample.prompt.reference for sample in samples],
    )


def reward_values(
    group: RolloutGroup, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerFast
) -> list[dict[str, Any]]:
    """Returns the values of each sample by name: those of `GIVEN`, which win, and the columns of its example."""
    return [
        {
            **sample.prompt.columns,
            "messages": messages_of(sample, tokenizer),
            "prompt_ids": sample.prompt.tokens.tolist(),
            "completion_ids": sample.completion.tokens.tolist(),
            "logprobs": sample.completion.logprobs.tolist(),
            "columns": dict(sample.prompt.columns),
            "task": sample.prompt.task,
            "metadata": _metadata(group, place, sample),
        }
        for place, sample in enumerate(samples)
    ]


def messages_of(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Returns the conversation: the prompt's messages, the policy's turns as `assistant`, and the environment's replies."""
    prompt, made = sample.prompt, sample.completion
    messages = [dict(message) for message in prompt.messages] or [{"role": "user", "content": prompt.text}]
    for start, end in made.spans():
        text = tokenizer.decode(made.tokens[start:end].tolist(), skip_special_tokens=True)
        messages.append({"role": "assistant" if made.sampled[start] else "environment", "content": text})
    return messages


def _metadata(group: RolloutGroup, place: int, sample: Sample) -> Mapping[str, Any]:
    made = sample.completion
    return {
        "group": group.number,
        "place": place,
        "source": sample.prompt.source,
        "finish_reason": made.finish_reason,
        "turns": made.turns,
        "turn_rewards": list(made.turn_rewards),
        "sampled": made.sampled.tolist(),
        "versions": made.versions.tolist(),
        "validation": group.key < 0,
    }
