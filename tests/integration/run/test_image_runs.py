"""SFT of models that take images, by a whole run: losses are those of a plain loop with transformers and torch's AdamW."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dagrl.config import Config
from dagrl.errors import RunError
from dagrl.run.evaluate import Evaluation, evaluate
from dagrl.run.train import train
from dagrl.telemetry.rollouts import read_rollouts, rollout_files
from tests.integration.main_job import steps_of
from tests.integration.megatron_reference import decay_groups
from tests.integration.rl.screens import screen
from tests.unit.data.processors import FAMILIES, Family, processor_of
from tests.unit.data.test_media import CONVERSATIONS, image, png, text, truth, turns_of
from tests.unit.workers.test_fsdp_media import model_of

pytestmark = pytest.mark.usefixtures("one_cluster")

STEPS, RATE = 3, 1e-3
Pair = tuple[list[dict[str, Any]], list[dict[str, Any]]]
OPTIMIZER = {
    **{"lr": RATE, "weight_decay": 0.01, "clip_grad": 1e9},
    **{"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8},
}
BATCH = ["several", "none", "the same twice", "one"]
"""With two workers of two rows each, or packed rows, some microbatches have images and others none."""

CASES = {
    "Qwen3-VL, two workers": (FAMILIES[0], {"fsdp_cfg": {"data_parallel_size": 2}, "train_micro_batch_size": 1}),
    "Qwen3-VL, packed": (FAMILIES[0], {"sequence_packing": {"enabled": True, "train_mb_tokens": 256}}),
    "Gemma 3, frozen, two workers, packed": (
        FAMILIES[1],
        {
            "fsdp_cfg": {"data_parallel_size": 2, "freeze_vision_tower": True},
            "sequence_packing": {"enabled": True, "train_mb_tokens": 256},
        },
    ),
}


def gold(model: Any, family: Family, messages: Sequence[dict[str, Any]]) -> Tensor:
    """Returns the sum of the log-probabilities of what the assistant says, and the number of its tokens."""
    turns = [turns_of(family, messages)]
    inputs = processor_of(family).apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    mask = torch.tensor(truth(family, messages)["assistant_masks"])[1:]
    logprobs = model(**inputs).logits[0, :-1].log_softmax(-1)
    return torch.stack([(logprobs.gather(-1, inputs["input_ids"][0, 1:, None])[:, 0] * mask).sum(), mask.sum()])


def plain_losses(family: Family, *, frozen: bool = False, pairs: Sequence[Pair] = ()) -> list[float]:
    """Trains a copy of the model on whole conversations, one at a time, or by DPO on pairs. Returns each step's loss."""
    from copy import deepcopy

    model = deepcopy(model_of(family)).train()
    trained = [one for name, one in model.named_parameters() if not (frozen and "vision_tower" in name)]
    optimizer = torch.optim.AdamW(decay_groups(trained, 0.01), lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    initial, found = model_of(family), []
    for _ in range(STEPS):
        if pairs:
            with torch.no_grad():
                before = [[gold(initial, family, answer)[0] for answer in pair] for pair in pairs]
            sums = [[gold(model, family, answer)[0] for answer in pair] for pair in pairs]
            gaps = [(c - rc) - (r - rr) for (c, r), (rc, rr) in zip(sums, before, strict=True)]
            loss = -torch.nn.functional.logsigmoid(0.1 * torch.stack(gaps)).mean()
        else:
            total, count = torch.stack([gold(model, family, CONVERSATIONS[name]) for name in BATCH]).sum(0)
            loss = -total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def changed_parameters(exported: Path, family: Family) -> list[str]:
    """Returns the names of what differs from the family's model in an exported one."""
    from transformers import AutoModelForImageTextToText

    before = dict(model_of(family).named_parameters())
    trained = AutoModelForImageTextToText.from_pretrained(exported).named_parameters()
    return [name for name, one in trained if not torch.equal(one, before[name])]


def config_of(family: Family, rows: Sequence[dict[str, Any]], where: Path, keys: dict[str, Any]) -> Config:
    """Writes a family's model and `rows` of data. Returns the configuration of a run on them."""
    model_of(family).save_pretrained(where / "model")
    processor_of(family).save_pretrained(where / "model")
    (where / "images").mkdir()
    for number in range(4):
        (where / "images" / f"{number}.png").write_bytes(png(number))
    (where / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    every = {"model_name": str(where / "model"), "backend": "fsdp", "precision": "float32", "max_total_sequence_length": 256}
    return Config.model_validate(
        {
            "name": "run",
            "output_dir": str(where),
            "cluster": {"num_cpus": 2, "num_gpus": 0},
            **keys,
            "policy": {**every, **keys["policy"]},
            "data": {"path": str(where / "rows.jsonl"), **keys["data"]},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_plain_loop(case: str, tmp_path: Path) -> None:
    family, policy = CASES[case]
    keys = {
        "algorithm": "sft",
        "policy": {"train_global_batch_size": len(BATCH), "optimizer": OPTIMIZER, **policy},
        "sft": {"max_num_steps": STEPS},
        "data": {"val_fraction": 0, "shuffle": False},
        "checkpointing": {"enabled": False, "export_hf": case.startswith("Gemma")},
    }
    config = config_of(family, [{"messages": CONVERSATIONS[name]} for name in BATCH], tmp_path, keys)
    train(config)
    losses = [row["loss"] for row in steps_of(config)]
    np.testing.assert_allclose(losses, plain_losses(family, frozen="frozen" in case), atol=1e-5, rtol=1e-5)
    if config.checkpointing.export_hf:
        from transformers import AutoProcessor

        assert AutoProcessor.from_pretrained(tmp_path / "run" / "final_model").image_token
        changed = changed_parameters(tmp_path / "run" / "final_model", family)
        assert any("projector" in name for name in changed) and not any("vision_tower" in name for name in changed)


@pytest.mark.slow
def test_losses_of_pairs_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """DPO on conversations with images, of which some differ in an image as well."""
    family, other = FAMILIES[0], [{"role": "user", "content": [image(3), text("hello")]}]
    pairs: list[Pair] = [
        (CONVERSATIONS[name], [*CONVERSATIONS[name][:-1], {"role": "assistant", "content": "the"}]) for name in BATCH[:3]
    ]
    rejected = [*CONVERSATIONS["one"][:1], {"role": "assistant", "content": "it"}]
    pairs.append(([*other, {"role": "assistant", "content": "and"}], rejected))
    keys = {
        "algorithm": "dpo",
        "policy": {"train_global_batch_size": len(pairs), "optimizer": OPTIMIZER, "sequence_packing": {"enabled": True}},
        "preference": {"max_num_steps": STEPS, "beta": 0.1},
        "data": {"val_fraction": 0, "shuffle": False},
        "checkpointing": {"enabled": False, "export_hf": False},
    }
    config = config_of(family, [{"chosen": chosen, "rejected": rejected} for chosen, rejected in pairs], tmp_path, keys)
    train(config)
    losses = [row["loss"] for row in steps_of(config)]
    np.testing.assert_allclose(losses, plain_losses(family, pairs=pairs), atol=1e-5, rtol=1e-5)


GRPO: dict[str, Any] = {
    "algorithm": "grpo",
    "policy": {
        "train_global_batch_size": 16,
        "train_micro_batch_size": 8,
        "logprob_batch_size": 16,
        "sequence_packing": {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 512},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0},
        "generation": {
            "max_new_tokens": 24,
            "stop_token_ids": [],
            "colocated": {"enabled": False},
            "vllm_cfg": {"max_num_seqs": 16, "enforce_eager": True, "kv_cache_memory_bytes": 32 << 20},
        },
    },
    "sft": {"max_num_steps": 0},
    "grpo": {"max_num_steps": 4, "num_prompts_per_step": 4, "num_generations_per_prompt": 4, "val_period": 0},
    "reward": {"function": "tests.integration.rl.reward_functions:length"},
    "data": {"shuffle": False},
}
PROMPTS = [{"messages": CONVERSATIONS[name]} for name in ("one", "several", "the same twice", "none")]


@pytest.mark.slow
def test_a_teacher_sees_the_images(tmp_path: Path) -> None:
    """A teacher that is the policy teaches nothing: their log-probabilities are equal."""
    pytest.importorskip("vllm")
    keys = {**GRPO, "loss_fn": {"name": "distill", "reference_policy_kl_penalty": 0}}
    keys |= {
        "models": {"teacher": {"model_name": str(tmp_path / "model"), "backend": "fsdp"}},
        "grpo": {**GRPO["grpo"], "max_num_steps": 2},
    }
    with pytest.raises(RunError, match="the run has learned nothing"):
        train(config_of(FAMILIES[0], PROMPTS, tmp_path, keys))
    gaps = [row["policy/reverse_kl"] for row in steps_of(tmp_path / "run", "policy/reverse_kl")]
    assert len(gaps) == 2 and np.abs(gaps).max() < 1e-6, gaps


@pytest.mark.slow
def test_a_resumed_run_and_an_evaluation_see_the_images(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint has the losses of one without a break; greedy completions are transformers'."""
    pytest.importorskip("vllm")
    family = FAMILIES[0]
    keys = {
        "algorithm": "sft",
        "policy": {"train_global_batch_size": 2, "optimizer": OPTIMIZER},
        "data": {"val_fraction": 0},
        "checkpointing": {"enabled": True, "save_period": 2, "export_hf": False},
    }
    config = config_of(family, [{"messages": CONVERSATIONS[name]} for name in BATCH], tmp_path, keys)
    losses = {}
    for name, ends in (("whole", (4,)), ("resumed", (2, 4))):
        for end in ends:
            more = {"name": name, "sft.max_num_steps": end, "checkpointing.resume": end != ends[0]}
            train(config.with_keys(more))
        losses[name] = [row["loss"] for row in steps_of(tmp_path / name)]
    assert len(losses["whole"]) == 4 and losses["resumed"] == losses["whole"]

    (tmp_path / "evaluation").mkdir()
    asked = [{"messages": CONVERSATIONS[name]} for name in BATCH]
    keys = {**GRPO, "data": {**GRPO["data"], "val_fraction": 0}}
    wanted = Evaluation(samples=0, ks=(), train_split=True)
    report = evaluate(config_of(family, asked, tmp_path / "evaluation", keys), wanted)
    model, processor = model_of(family), processor_of(family)
    assert len(report.completions) == len(BATCH)
    for (completion,) in report.completions:
        name = BATCH[int(completion.sample.prompt.source.rpartition("line ")[2]) - 1]
        turns = turns_of(family, CONVERSATIONS[name][:-1])
        inputs = processor.apply_chat_template(
            [turns], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        made = model.generate(**inputs, do_sample=False, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :]
        assert completion.sample.completion.tokens.tolist() == made.tolist()


def check_screens(family: Family, run: Path) -> None:
    """Checks that what an environment shows has the tokens of the processor, and that its images are the run's."""
    (question, answer), seen, eos = CONVERSATIONS["one"], 0, processor_of(family).tokenizer.eos_token_id
    shown = [{"role": "user", "content": [{"type": "image", "image": screen(number)}, text("and")]} for number in range(2)]
    rows = [row for path in rollout_files(run / "rollouts").values() for row in read_rollouts(path)]
    assert rows
    for row in (row for row in rows if "line 1" in row["source"]):
        parts = [turn for turn in row["turns"] if turn["role"] == "environment"]
        messages = [*turns_of(family, [question]), answer]
        for number, part in enumerate(parts):
            *_, end, newline = whole = tokens_of(family, messages, opened=False)
            messages.append(shown[number])
            expected = [newline, *tokens_of(family, messages, opened=True)[len(whole) :]]
            ended = row["tokens"][part["start"] - 1] in (end, eos)  # else a stop token did, and the end of the turn follows
            assert list(row["tokens"][part["start"] : part["end"]]) == [*[end] * (not ended), *expected]
            messages.append(answer)
        names = row["media"]
        assert len(names) == 1 + len(parts)
        for number, name in enumerate(names[1:]):
            with Image.open(run / "media" / name) as kept:
                assert kept.tobytes() == screen(number).tobytes()
        seen += len(parts)
    assert seen > 8


def tokens_of(family: Family, messages: Sequence[dict[str, Any]], *, opened: bool) -> list[int]:
    processor = processor_of(family)
    output = processor.apply_chat_template([messages], tokenize=True, return_dict=True, add_generation_prompt=opened)
    return list(output["input_ids"][0])


def check_run(config: Config, family: Family) -> list[str]:
    """Checks that engine and training agree in each of four steps. Returns what the run has changed."""
    errors = [row["gen_kl_error"] for row in steps_of(config, "gen_kl_error")]
    assert len(errors) == 4 and max(errors) < 1e-5, errors
    return changed_parameters(Path(config.output_dir) / config.name / "final_model", family)


SENT: dict[str, tuple[Family, dict[str, Any]]] = {
    "Qwen3-VL with screens": (FAMILIES[0], {}),
    "Idefics3": (FAMILIES[2], {}),
    "Qwen3-VL, adapters": (FAMILIES[0], {"peft": {"enabled": True, "dim": 8, "refit": "adapters"}}),
    "Qwen3-VL, merged adapters": (FAMILIES[0], {"peft": {"enabled": True, "dim": 8, "refit": "merged"}}),
    "Idefics3, adapters": (FAMILIES[2], {"peft": {"enabled": True, "dim": 8, "refit": "adapters"}}),
}

SCREENS = {"function": "tests.integration.rl.screens:Screens", "max_turns": 3}


def screens_policy(family: Family) -> dict[str, Any]:
    """Returns the policy's keys with ends of turns that a random model samples."""
    stops = [token for token in range(len(processor_of(family).tokenizer)) if token % 8 == 1]
    return {**GRPO["policy"], "generation": {**GRPO["policy"]["generation"], "stop_token_ids": stops}}


@pytest.mark.parametrize(
    "sent", [pytest.param(sent, marks=[] if "screens" in sent else [pytest.mark.slow]) for sent in SENT]
)
def test_engines_see_what_training_sees(sent: str, tmp_path: Path) -> None:
    """The engine's log-probabilities are those of training, by its own weights and by refitted ones, tower and all."""
    family, policy = SENT[sent]
    pytest.importorskip("vllm")
    keys = {**GRPO, "policy": {**GRPO["policy"], **policy}}
    if "screens" in sent:
        keys["policy"] = screens_policy(family) | policy
        keys["environment"] = SCREENS
    config = config_of(family, PROMPTS, tmp_path, keys)
    train(config)
    changed = check_run(config, family)
    if "screens" in sent:
        check_screens(family, tmp_path / "run")
    if policy:
        assert changed and all(".layers." in name and "vis" not in name for name in changed)
    else:
        assert any("vis" in name for name in changed) and any("lm_head" in name for name in changed)


@pytest.mark.slow
def test_a_model_that_takes_images_learns_from_texts(tmp_path: Path) -> None:
    """Its engine makes a processor, which no request uses. The tower stays as it is."""
    pytest.importorskip("vllm")
    rows = [{"prompt": "hello and it", "response": "5"}, {"prompt": "the", "response": "it"}] * 2
    config = config_of(FAMILIES[0], rows, tmp_path, GRPO)
    train(config)
    changed = check_run(config, FAMILIES[0])
    assert changed and not any("visual" in name for name in changed)
