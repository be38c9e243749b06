"""Sides of `bench step`, `train`, `peers` and `generate`: cases, configurations and the numbers of rows."""

from __future__ import annotations

import argparse
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dagrl.bench import generate, peers, step, train
from dagrl.bench.models import CHARACTERS, SHAPES, write_with_tokenizer
from dagrl.bench.peers.trl import unexpanded
from dagrl.bench.workloads import GROUP, PICTURE_PROMPT, PICTURES, RolloutCase, grpo_config, pictures, rollout_case, rows
from dagrl.config import Config
from dagrl.config.checks import check_settings
from dagrl.config.plan import RunPlan
from dagrl.data.media import MediaProcessor, load_processor
from dagrl.data.tokenization import collate, encode_demonstrations, encode_prompts
from dagrl.errors import ConfigError, RunError
from dagrl.run.model import character_tokenizer


def options(module: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)


def line(seconds: float, **more: float) -> dict[str, float]:
    return {"timing_s/total": seconds, "trained_tokens": 100.0, **more}


def test_rows_of_a_run_have_medians_of_its_metrics() -> None:
    turn = step.counted([line(1.0, gen_kl_error=3.0), line(4.0, gen_kl_error=1.0), line(3.0)])
    assert turn.seconds == [1.0, 4.0, 3.0]
    assert turn.facts == {"gen_kl_error": 2.0, "trained_tokens_per_s": 300.0 / 8.0}
    with pytest.raises(RunError, match="too few steps"):
        step.counted([])


@pytest.mark.parametrize(("side", "first", "steps"), [("sync", 2, 2 + 3 + 1), ("in flight, age 4", 5, 5 + 3 + 5)])
def test_steps_that_build_up_or_use_up_a_lead_do_not_count(
    monkeypatch: pytest.MonkeyPatch, side: str, first: int, steps: int
) -> None:
    asked: list[str] = []

    def run(config: Path, words: list[str]) -> list[dict[str, float]]:
        asked.extend(words)
        return [line(float(number)) for number in range(steps)]

    monkeypatch.setattr(step, "train_run", run)
    (turn,) = step.turn("c", options(step, "--steps", "3"), step.overrides_of(side)).values()
    assert f"grpo.max_num_steps={steps}" in asked
    assert turn.seconds == [float(first), first + 1.0, first + 2.0]


def test_sides_are_known_or_have_overrides() -> None:
    assert step.overrides_of("fp8: policy.precision=x a.b=c") == ["policy.precision=x", "a.b=c"]
    with pytest.raises(ConfigError, match=r"found 'synk'; expected 'NAME: a\.b=c \.\.\.' or one of sync; eager"):
        step.overrides_of("synk")


def test_training_cases(tmp_path: Path) -> None:
    case = train.parse_case("30b@4:dp4ep4 policy.precision=float32", tiny=False)
    assert (case.shape.config["num_hidden_layers"], case.layout.ep, case.overrides) == (4, 4, ("policy.precision=float32",))
    config = Config.model_validate(train.sft_config(tmp_path, 16, 2048, 2, "bfloat16", case.layout))
    assert config.policy.megatron_cfg.expert_model_parallel_size == 4 and config.policy.train_micro_batch_size == 2
    for wrong in ("4b:dp1:lora", "5b:dp1", ""):
        with pytest.raises(ConfigError, match="expected MODEL:LAYOUT"):
            train.parse_case(wrong, tiny=False)


def test_losses_are_compared_with_the_first_case_of_the_model() -> None:
    sizes = {"model": "4b", "gpus": 2, "tokens": 100, "tflop": 1.0, "median_s": 0.5}
    first, second = train.finish([{**sizes, "losses": [3.0, 4.0]}, {**sizes, "losses": [3.0, 4.5, 9.0]}])
    assert (first["loss_error"], second["loss_error"], first["tokens_per_s_per_gpu"]) == (0.0, 0.1, 100.0)


def test_demonstrations_have_the_requested_length() -> None:
    """A prompt of one token; all later tokens, among them the end of the text, are learned."""
    batch = collate(encode_demonstrations(rows(3, 17).demonstrations, character_tokenizer(CHARACTERS)))
    assert batch["lengths"].tolist() == [17] * 3 and batch["loss_mask"].sum() == 3 * 16


def test_rollouts_fit_the_configuration_of_a_run(tmp_path: Path) -> None:
    case = rollout_case("grpo 0.6b 128", "0.6b", "128", 256, micro=None, tiny=False, kv_share=1e3)
    config = Config.model_validate(grpo_config(case, tmp_path, {}))
    check_settings(config, RunPlan.of(config))
    assert config.grpo.num_prompts_per_step * GROUP == 128 and config.policy.train_micro_batch_size == 16
    layers, heads, size = (
        SHAPES["qwen3-0.6b"].config[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim")
    )
    blocks = (
        128 * 17 + 16 * 8 + 16
    )  # completions with one block more each, prompts once a group, and one block of slack each
    assert case.kv_bytes == blocks * 16 * 2 * 2 * layers * heads * size  # type: ignore[operator]
    assert RolloutCase(**asdict(case)) == case


def test_trl_trains_and_samples_on_the_tokens_of_dagrl(tmp_path: Path) -> None:
    """TRL trains on what the processor writes; vLLM expands what the tokenizer writes, one placeholder an image."""
    processor: Any = load_processor(write_with_tokenizer(SHAPES["qwen3-vl-2b"].narrowed(), tmp_path))
    examples, whole = pictures(len(PICTURES)).train, []
    for example, tokens in zip(examples, (196, 300, 475, 768), strict=True):
        (file,), (_, question) = example.messages[0].media, example.messages[0].content
        content = [{"type": "image", "image": Image.open(io.BytesIO(file.data))}, question]
        chat = [{"role": "user", "content": content}]
        written = processor.apply_chat_template([chat], add_generation_prompt=True, tokenize=True, return_dict=True)
        whole += written["input_ids"]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        assert unexpanded(whole[-1], 6) == processor.tokenizer(text)["input_ids"]
        assert (len(whole[-1]), whole[-1].count(6)) == (tokens + 55, tokens)
    assert max(map(len, whole)) <= PICTURE_PROMPT
    prompts = encode_prompts(examples, processor.tokenizer, MediaProcessor(processor))
    assert [prompt.tokens.tolist() for prompt in prompts] == whole


@pytest.mark.parametrize(
    ("module", "case", "message"),
    [
        (peers, "ppo 0.6b 128", "with a kind of grpo or sft; found 'ppo'"),
        (peers, "grpo 0.6b 12", "in whole groups of 8"),
        (peers, "sft 7b 16", "expected a model of 0.6b, 1.7b, 4b"),
        (generate, "0.6b", "and a number of sequences"),
    ],
)
def test_malformed_cases_are_rejected_before_measuring(module: Any, case: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        module.run(options(module, "--cases", case))


def test_peers_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken: dict[str, Any] = {}
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "torchtitan" else True)
    monkeypatch.setattr(peers.harness, "run", lambda *words: taken.update(contests=words[1], left_out=words[4]))
    monkeypatch.setattr(peers, "write_with_tokenizer", lambda *words: tmp_path)
    peers.run(options(peers, "--cases", "sft 0.6b 16", "grpo 0.6b 8"))
    assert taken["left_out"] == {"torchtitan": "torchtitan is not installed"}
    assert [contest.name for contest in taken["contests"]] == ["sft 0.6b 16", "grpo 0.6b 8"]
