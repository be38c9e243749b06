"""Preferences from sampled completions, for DPO and reward models.

    dagrl evaluate recipes/gemma3_270m/stories.yaml --train --limit 4000 --no-greedy --json sampled.json \\
        --checkpoint runs/gemma3_270m_sft/final_model
    python -m recipes.gemma3_270m.pairs sampled.json -o runs/gemma3_270m_data/pairs.jsonl

A row for each prompt that has right and wrong completions: the first of either.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.from_scratch.gsm8k import Row, write_rows


def pairs(prompts: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yields the pairs of the prompts of `dagrl evaluate --json`."""
    for prompt in prompts:
        right, wrong = ([c["text"] for c in prompt["completions"] if (c["reward"] == 1) == kind] for kind in (True, False))
        if right and wrong:
            yield {"prompt": prompt["prompt"], "chosen": right[0], "rejected": wrong[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sampled", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    write_rows(options.output, pairs(json.loads(options.sampled.read_text(encoding="utf-8"))[0]["prompts"]))
