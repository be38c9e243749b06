"""Training data from sampled completions: preferences for DPO and reward models, and questions within reach for GRPO.

    dagrl evaluate recipes/gemma3_270m/stories.yaml --train --limit 4000 --no-greedy --json sampled.json \\
        --checkpoint runs/gemma3_270m_sft/final_model
    python -m recipes.gemma3_270m.sampled sampled.json --pairs runs/gemma3_270m_data/pairs.jsonl

    dagrl evaluate recipes/gemma3_270m/gsm8k.yaml data.path=runs/gemma3_270m_data/train.jsonl --train --limit 7473 \\
        --samples 4 --no-greedy --json sampled.json --checkpoint runs/gemma3_270m_sft/final_model
    python -m recipes.gemma3_270m.sampled sampled.json --reach runs/gemma3_270m_data/reach.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.from_scratch.gsm8k import Row, write_rows

RIGHT = 1


def pairs(prompts: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yields the first right and the first wrong completion of each prompt of `dagrl evaluate --json` that has both."""
    for prompt in prompts:
        completions = prompt["completions"]
        right, wrong = ([one["text"] for one in completions if (one["reward"] >= RIGHT) == kind] for kind in (True, False))
        if right and wrong:
            yield {"prompt": prompt["prompt"], "chosen": right[0], "rejected": wrong[0]}


def reach(prompts: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yields the prompts with right and wrong completions, whose groups GRPO learns from, and their solutions."""
    for prompt in prompts:
        if {completion["reward"] >= RIGHT for completion in prompt["completions"]} == {True, False}:
            yield {"prompt": prompt["prompt"], "response": prompt["reference"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sampled", type=Path)
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--pairs", type=Path, metavar="F")
    output.add_argument("--reach", type=Path, metavar="F")
    options = parser.parse_args()
    prompts = json.loads(options.sampled.read_text(encoding="utf-8"))[0]["prompts"]
    write_rows(options.pairs or options.reach, pairs(prompts) if options.pairs else reach(prompts))
