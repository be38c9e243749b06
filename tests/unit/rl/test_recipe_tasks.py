"""The tasks of recipes/gemma3_270m, whose solutions are right and rewarded, and the models of recipes/shapes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from dagrl.data.media import MediaProcessor, load_processor
from dagrl.data.tokenization import encode_prompts
from dagrl.rl.tasks import CELL, SIDE, shapes
from recipes.gemma3_270m.tasks import PROMPT, final_answer, prepare, stories
from recipes.shapes.make import make


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_solutions_of_stories_are_right(steps: int) -> None:
    splits = stories(steps, count=200, held_out=50)
    assert not {one.prompt for one in splits.train} & {one.prompt for one in splits.validation}
    for example in (*splits.train, *splits.validation):
        calculations = re.findall(r"=<<([0-9+*/-]+)=(\d+)>>(\d+)", example.response)
        assert len(calculations) == steps
        assert all(eval(formula) == int(result) == int(again) for formula, result, again in calculations)  # noqa: S307
        assert example.response.endswith(f"\n#### {calculations[-1][1]}")
        told = set(re.findall(r"\d+", example.prompt))
        named = {number for formula, *_ in calculations for number in re.findall(r"\d+", formula)}
        results = {result for _, result, _ in calculations}
        assert named <= told | results | {"2", "3", "4", "5"}  # half, triples, a fifth
    assert final_answer([example.prompt], [example.response], [example.response]) == [{"right": 1.0, "format": 1.0}]


def test_the_same_seed_makes_the_same_stories() -> None:
    assert stories(2, 20, 5) == stories(2, 20, 5) != stories(2, 20, 5, seed=1)
    with pytest.raises(ValueError, match="expected: at least 1 each"):
        stories(0)


def test_gsm8k_is_cut_before_its_last_results(tmp_path: Path) -> None:
    answer = "It sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": "How many?", "answer": answer}) + "\n")
    prepare(tmp_path, tmp_path / "out")
    begins = {"train": " It", "one_left": "72>>72", "two_left": "24>>24"}
    begins |= {"test": " It", "test_one_left": "72>>72", "test_two_left": "24>>24"}
    for file, begin in begins.items():
        (row,) = map(json.loads, (tmp_path / "out" / f"{file}.jsonl").read_text().splitlines())
        assert row["prompt"].startswith(PROMPT.format("How many?")) and row["response"].startswith(begin)
        assert (row["prompt"] + row["response"]).endswith(f" {answer}")


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_an_image_of_shapes_has_a_token_for_each_cell(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    make(family, tmp_path, seed=0)
    processor = MediaProcessor(load_processor(tmp_path))
    (prompt,) = encode_prompts(shapes(1, 0, demonstrations_per_prompt=1).train, processor.tokenizer, processor)
    assert prompt.media is not None and np.count_nonzero(prompt.media.tokens) == (SIDE // CELL) ** 2
    assert len(prompt.tokens) <= AutoConfig.from_pretrained(tmp_path).get_text_config().max_position_embeddings
