"""The recipe without pretrained weights: what it makes of GSM8K's files, its reward, and its checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dagrl.config.file import load_config
from dagrl.rl.rewards import RewardRunner, rewards_of
from dagrl.run.model import write_random_model
from dagrl.run.preflight import preflight
from recipes.from_scratch import gsm8k

pytest.importorskip("megatron.core")
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[3]
PROBLEM = {
    "question": "How many clips are 48 and half as many?",
    "answer": "Half are 48/2 = <<48/2=24>>24 clips.\nAll are 48+24 = <<48+24=72>>72 clips.\n#### 72",
}
SIMPLE = {"question": "What is 6 times 7?", "answer": "It is 6*7 = $<<6*7=42>>42.\n#### 42"}


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe's files, in a working directory as its configurations expect it."""
    monkeypatch.setattr(gsm8k, "IMITATED", 40)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [PROBLEM, SIMPLE] * 80))
    gsm8k.prepare(tmp_path, tmp_path / "runs" / "from_scratch_data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    return tmp_path / "runs" / "from_scratch_data"


def test_what_is_left_of_a_solution_completes_it(prepared: Path) -> None:
    one, simple = rows(prepared / "one_left.jsonl")[:2]
    assert one["prompt"].endswith("<<48/2=24>>24 clips.\nAll are 48+24 = <<48+24=") and one["response"].startswith("72>>72")
    assert one["prompt"] + one["response"] == f"Question: {PROBLEM['question']}\nAnswer: {PROBLEM['answer']}"
    assert simple["prompt"].endswith("$<<6*7=")
    (two, *_), count = rows(prepared / "two_left.jsonl"), len(rows(prepared / "two_left.jsonl"))
    assert two["response"].startswith("24>>24 clips.\nAll") and count == 60, "half of 120 problems have two calculations"
    assert rows(prepared / "calculations.jsonl")[:2] == [
        {"prompt": " <<48/2=", "response": "24>>"},
        {"prompt": " <<48+24=", "response": "72>>"},
    ]
    (called, *_), (twice, *_) = rows(prepared / "calls_one_left.jsonl"), rows(prepared / "calls_two_left.jsonl")
    assert called["prompt"].endswith("= <calc>48/2</calc><result>24</result>\n24 clips.\nAll are 48+24 = ")
    assert called["response"] == "<calc>48+24</calc><result>72</result>\n72 clips.\n#### 72"
    assert twice["response"].startswith("<calc>48/2</calc>")
    tokenizer = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    for row in (gsm8k.solution(PROBLEM), one, called):
        text = row["prompt"] + row["response"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        ids = [tokenizer(part)["input_ids"] for part in (row["prompt"], row["response"])]
        assert ids[0] + ids[1] == tokenizer(text)["input_ids"], "a prompt ends between two tokens"
    assert tokenizer.tokenize("2</calc><result>2") == ["2", "</calc>", "<result>", "2"], "a turn ends between two tokens"


def test_the_reward_is_the_final_answer(prepared: Path) -> None:
    config = load_config(ROOT / "recipes/from_scratch/grpo.yaml").reward
    with RewardRunner(config) as runner:
        texts = ["72>>72 clips.\n#### 72", "71>>71.\n#### 71", "72>>72 clips.", "72\n####"]
        found = rewards_of(runner.submit([""] * 4, texts, [PROBLEM["answer"]] * 4).result())
    assert found.values.tolist() == [1, 0, 0, 0]
    assert found.parts["format"].tolist() == [1, 1, 0, 0]


def test_all_configurations_pass_all_checks(prepared: Path) -> None:
    sft = load_config(ROOT / "recipes/from_scratch/sft.yaml")
    learned = preflight(sft)
    assert sft.policy.random_init is not None and {row.task for row in learned.demonstrations} == {
        "solutions",
        "calculations",
        "calls",
    }
    small = sft.policy.random_init.model_copy(
        update={"hf_config": {**sft.policy.random_init.hf_config, "num_hidden_layers": 1, "hidden_size": 64}}
    )
    for directory in ("from_scratch_sft/final_model", "from_scratch_student"):
        write_random_model(small, learned.tokenizer, Path("runs") / directory)
    for recipe, samples in (("grpo", 64 * 16), ("calculator", 64 * 16), ("distill", 128 * 4)):
        inputs = preflight(load_config(ROOT / f"recipes/from_scratch/{recipe}.yaml"))
        assert {prompt.task for prompt in inputs.prompts} == {"one_left", "two_left"}
        assert inputs.config.policy.train_global_batch_size == samples, "one optimizer step for each batch"
