"""Preferences for DPO and reward models from sampled completions.

    dagrl evaluate recipes/gemma3_270m/stories.yaml --train --limit 4000 --no-greedy --json sampled.json \\
        --checkpoint runs/gemma3_270m_sft/final_model
    python -m recipes.gemma3_270m.sampled sampled.json -o runs/gemma3_270m_data/pairs.jsonl
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
        right, wrong = (
            [one["text"] for one in completions if ((one["reward"] or 0) >= RIGHT) == kind] for kind in (True, False)
        )
        if right and wrong:
            yield {"prompt": prompt["prompt"], "chosen": right[0], "rejected": wrong[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sampled", type=Path, help="the JSON file of dagrl evaluate")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="F", help="the file to write")
    options = parser.parse_args()
    prompts = json.loads(options.sampled.read_text(encoding="utf-8"))[0]["prompts"]
    write_rows(options.output, pairs(prompts))
