"""Gemma 3 270M with its published weights: SFT, GRPO, evaluation and export, against transformers (`make test-pretrained`).

DAGRL_GEMMA3 names the directory that recipes/gemma3_270m/make.py wrote. Needs 12 GB of memory.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.cli.main import main
from dagrl.config.file import load_config
from dagrl.run.train import train
from dagrl.telemetry.record import read_metrics
from dagrl.telemetry.rollouts import read_rollouts
from recipes.gemma3_270m.tasks import PROMPT

MODEL = os.environ.get("DAGRL_GEMMA3", "")
RECIPES = Path(__file__).parents[2] / "recipes" / "gemma3_270m"
SMALL = (
    *("policy.train_global_batch_size=4", "policy.train_micro_batch_size=4", "policy.logprob_batch_size=4"),
    *(
        "policy.max_total_sequence_length=112",
        "policy.scheduler.lr_warmup_iters=0",
        "logger.tensorboard_enabled=false",
        "checkpointing.save_period=1",
    ),
    *("timeouts.start_s=600", "timeouts.replay_s=600", "timeouts.warmup_s=600", "timeouts.hang_floor_s=300"),
)
QUESTIONS = (
    ("Ana has 3 apples and buys 4 more. How many apples does she have?", "She has 3+4=<<3+4=7>>7 apples.\n#### 7"),
    ("Tom has 9 coins and loses 2. How many coins are left?", "He has 9-2=<<9-2=7>>7 coins left.\n#### 7"),
    ("A box holds 6 eggs. How many eggs are in 5 boxes?", "There are 6*5=<<6*5=30>>30 eggs.\n#### 30"),
    ("Beth shares 8 cards equally with Max. How many has each?", "Each has 8/2=<<8/2=4>>4 cards.\n#### 4"),
)

pytestmark = [pytest.mark.timeout(1800), pytest.mark.skipif(not MODEL, reason="DAGRL_GEMMA3 names no model")]


@dataclass(frozen=True)
class Chain:
    """The runs of SFT and GRPO, and GSM8K's questions in a file."""

    sft: Path
    grpo: Path
    questions: Path


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Two steps of SFT, and two of GRPO from the model that they export, in float32."""
    directory = tmp_path_factory.mktemp("runs")
    rows, questions = directory / "rows.jsonl", directory / "questions.jsonl"
    rows.write_text("".join(json.dumps({"prompt": PROMPT.format(q), "response": f" {a}"}) + "\n" for q, a in QUESTIONS))
    questions.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in QUESTIONS))
    data = f"data.path={rows}", f"data.val_path={rows}"
    words = *SMALL, f"output_dir={directory}"
    sft = "name=sft", f"policy.model_name={MODEL}", *data, "sft.max_num_steps=2", "sft.max_num_epochs=null"
    train(load_config(RECIPES / "sft.yaml", (*words, *sft)))
    grpo = (
        *("name=grpo", f"policy.model_name={directory / 'sft' / 'final_model'}", "policy.generation.max_new_tokens=24"),
        *("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "grpo.max_num_steps=2"),
        *("grpo.max_val_samples=2", f"evaluation.sets=[gsm8k={questions}]"),
        *("reward.function=dagrl.bench.workloads:alternating", "reward.weights={}"),  # the task's would all be 0 so soon
    )
    train(load_config(RECIPES / "stories.yaml", (*words, *grpo)))
    return Chain(directory / "sft", directory / "grpo", questions)


def load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def logprobs(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Returns transformers' log-probability of each of the `tokens` after the prompt."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    # In float32, torch sums 262,144 probabilities with an error of 3e-5 in their logarithm.
    chosen: list[float] = logits.double().log_softmax(-1)[range(len(tokens)), tokens].tolist()
    return chosen


def metrics(run: Path) -> Mapping[int, Mapping[str, Any]]:
    lines: dict[int, dict[str, Any]] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        lines.setdefault(int(line["step"]), {}).update(line)  # type: ignore[arg-type]
    return lines


def loss(directory: Path) -> float:
    """Returns transformers' mean negative log-likelihood of the answers to `QUESTIONS`."""
    from transformers import AutoTokenizer

    model, tokenizer = load(directory), AutoTokenizer.from_pretrained(directory)
    values: list[float] = []
    for question, answer in QUESTIONS:
        prompt = tokenizer(PROMPT.format(question))["input_ids"]
        assert prompt[0] == tokenizer.bos_token_id  # without it the model writes nonsense
        response = [*tokenizer(f" {answer}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        values += logprobs(model, prompt, response)
    return -float(np.mean(values))


def test_sft_learns_what_it_exports(chain: Chain) -> None:
    steps = metrics(chain.sft)
    assert steps[0]["validation/loss"] == pytest.approx(loss(Path(MODEL)), abs=2e-5)
    assert steps[2]["validation/loss"] == pytest.approx(loss(chain.sft / "final_model"), abs=2e-5)
    assert steps[2]["validation/loss"] < steps[0]["validation/loss"]


def test_trainer_engine_and_transformers_agree(chain: Chain) -> None:
    steps = metrics(chain.grpo)
    assert set(steps) == {0, 1, 2} and all(steps[step]["gen_kl_error"] < 1e-6 for step in (1, 2))
    from pyarrow import parquet

    model = load(chain.sft / "final_model")
    rows = parquet.read_table(chain.grpo / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(rows) == 4
    for row in rows:
        expected = logprobs(model, row["prompt_tokens"], row["tokens"])
        np.testing.assert_allclose(row["logprobs"], expected, atol=2e-4)  # vLLM sums in float32
        if row["train_logprobs"] is not None:
            np.testing.assert_allclose(row["train_logprobs"], expected, atol=1e-4)


def test_standard_sets_are_measured_before_and_after(chain: Chain) -> None:
    steps = metrics(chain.grpo)
    for step in (0, 2):
        share = steps[step]["evaluation/gsm8k"]
        assert (
            share * 4 == int(share * 4)
            and steps[step]["evaluation/gsm8k_low"] <= share <= steps[step]["evaluation/gsm8k_high"]
        )
    assert "evaluation/gsm8k" not in steps[1]
    answers = read_rollouts(chain.grpo / "rollouts" / "other_000000.parquet", ["task", "reward"])
    rewards = [row["reward"] for row in answers if row["task"] == "gsm8k"]
    assert len(rewards) == 4 and steps[0]["evaluation/gsm8k"] == np.mean(rewards)


def test_a_checkpoint_exports_the_final_model(chain: Chain, tmp_path: Path) -> None:
    checkpoint = chain.grpo / "checkpoints" / "step_00000002"
    assert main(["export", str(checkpoint), "-o", str(tmp_path / "model")]) == 0
    tokens = torch.tensor([[2, 818, 5279, 529, 7001, 563]])
    with torch.no_grad():
        final, again, before = (
            load(path)(tokens).logits for path in (chain.grpo / "final_model", tmp_path / "model", chain.sft / "final_model")
        )
    assert torch.equal(final, again)
    assert not torch.equal(final, before)
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        assert (tmp_path / "model" / name).exists()
