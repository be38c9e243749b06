"""Models that take images, in one process: hidden states, losses and gradients are those of transformers' own loop.

Truths: `processor.apply_chat_template` of each conversation with its images, alone, and the model's own loss of it.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from dagrl.bench.image_models import make_image_model
from dagrl.config import Config, PeftConfig, PolicyConfig
from dagrl.config.file import load_config
from dagrl.config.plan import RunPlan
from dagrl.data.media import MediaCache, MediaProcessor
from dagrl.data.tokenization import Demonstration, collate, encode_demonstrations
from dagrl.errors import ConfigError
from dagrl.run.derive import Derived, derive_from_data
from dagrl.run.model import load_tokenizer, model_description, token_count, write_random_model
from dagrl.run.preflight import check_media
from dagrl.runtime.shapes import Batch
from dagrl.workers.fsdp.architecture import find_class
from dagrl.workers.fsdp.attention import TORCH_VARLEN
from dagrl.workers.fsdp.backend import FsdpBackend
from dagrl.workers.fsdp.checks import check_model
from dagrl.workers.fsdp.lora import Adapters, add_adapters
from dagrl.workers.fsdp.media import MediaInputs
from dagrl.workers.fsdp.model import HiddenStates
from dagrl.workers.fsdp.output import base_of
from dagrl.workers.fsdp.separation import check_separation, unseparated
from dagrl.workers.train.microbatches import split_batch
from dagrl.workers.train.row_plans import SplitRule, plan_rows, prefix_groups
from tests.unit.data.processors import FAMILIES, Family, open_medium, processor_of
from tests.unit.data.test_media import CONVERSATIONS, folder, image, read, truth, turns_of  # noqa: F401
from tests.unit.workers.test_packed_attention import RANK, flash_operator

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_images.yaml"
ORDER = ["none", "several", "one", "the same twice"]
ASKED, *_ = CONVERSATIONS["one"]
SAMPLES = {
    **CONVERSATIONS,
    "one again": [ASKED, {"role": "assistant", "content": "the hello"}],
    "one and another": [
        *(ASKED, {"role": "assistant", "content": "it"}),
        *({"role": "user", "content": [image(1)]}, {"role": "assistant", "content": "hello"}),
    ],
}
GROUP = ["none", "one", "one again", "one and another", "none"]
TEXT = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 32, "pad_token_id": None}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_heads": 4}
PACKED = SplitRule(packed=True, rows=0, tokens=600, by_row=True)
RULES = {"padded": SplitRule(packed=False, rows=2, tokens=0, by_row=True), "packed": PACKED}
RULES["shared"] = replace(PACKED, least_shared=0.0)


@cache
def model_of(family: Family) -> Any:
    """Builds a model of a family's shape from a seed."""
    processor = processor_of(family)
    (image,) = processor.image_token_ids
    text: dict[str, Any] = {**TEXT, "vocab_size": len(processor.tokenizer)}
    vision: dict[str, Any] = dict(VISION)
    if family.name == "Qwen3-VL":
        kind, more = "qwen3_vl", {}
        ropes = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 10000.0}
        text |= {"rope_parameters": ropes}
        vision |= {"depth": 2, "patch_size": 4, "out_hidden_size": 32}
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    elif family.name == "Gemma 3":
        kind, more = "gemma3", {"mm_tokens_per_image": 4}
        text |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32}
        vision |= {"image_size": 16, "patch_size": 4}
    else:
        kind, more = "idefics3", {"scale_factor": 2}
        text |= {"model_type": "llama"}
        vision |= {"image_size": 32, "patch_size": 8}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, image_token_id=image, **more)
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").float().eval()
    with torch.no_grad():  # so that images matter
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def rows_of(family: Family, where: Path, names: Sequence[str]) -> list[Demonstration]:
    processor = MediaProcessor(processor_of(family))
    examples = read(where, [{"messages": SAMPLES[name]} for name in names])
    return encode_demonstrations(examples, processor.tokenizer, "all", processor)


def root_of(family: Family, model: Any, rows: Sequence[Demonstration]) -> HiddenStates:
    """Returns the hidden states of a model, which opens the images of these rows."""
    media = {medium.id: medium for row in rows if row.media is not None for medium in row.media.items}
    root = HiddenStates(model)
    root.media = MediaInputs(base_of(model), processor_of(family), lambda one: open_medium(media[one]))
    return root


def expected(family: Family, name: str) -> tuple[Tensor, int]:
    """Returns the sum of a conversation's losses by the model's own forward pass, and the number of its learned tokens."""
    processor = processor_of(family)
    turns = [turns_of(family, SAMPLES[name])]
    inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    mask = torch.tensor(truth(family, SAMPLES[name])["assistant_masks"])
    logits = model_of(family)(**inputs).logits[0, :-1].log_softmax(-1)
    losses = -logits.gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]
    return (losses * mask[1:]).sum(), int(mask.sum())


def inputs_of(row: Demonstration) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens, positions and image ids [1, tokens] of a row with images."""
    assert row.media is not None
    return torch.from_numpy(row.tokens)[None], torch.arange(len(row))[None], torch.from_numpy(row.media.tokens)[None]


@pytest.mark.parametrize(
    ("family", "attention", "rule"),
    [
        *((family, "sdpa", rule) for family in FAMILIES[:3] for rule in ("padded", "packed")),
        *((FAMILIES[0], TORCH_VARLEN, rule) for rule in ("padded", "packed")),
        *((family, "sdpa", "shared") for family in (FAMILIES[0], FAMILIES[2])),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_losses_and_gradients_are_those_of_a_plain_loop(
    family: Family,
    attention: str,
    rule: str,
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `torch_varlen`, which is the default on GPUs, the tower sees whole images, and only the text has sequences.

    The samples of a prompt share it, with its image, and one of them has an image of its own.
    """
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_operator)
    names = GROUP if rule == "shared" else ORDER
    model, rows = deepcopy(model_of(family)), rows_of(family, folder, names)
    model.set_attn_implementation(attention)
    root = root_of(family, model, rows)
    batch = collate(rows, media=True)
    model.zero_grad()
    loss = torch.zeros(())
    cut = split_batch(batch, RULES[rule], RANK)
    assert (sum(cut.saved) > 0.3 * batch["lengths"].sum()) == (rule == "shared")
    for item in cut.items:
        hidden = root(item.tokens, item.positions, item.segments, None, item.media)
        logprobs = model.get_output_embeddings()(hidden).log_softmax(-1)
        loss = loss - (logprobs.gather(-1, item.labels[..., None])[..., 0] * item.data["loss_mask"]).sum()
    loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    plain = model_of(family)
    plain.zero_grad()
    sums = [expected(family, name) for name in names]
    whole = torch.stack([one for one, _ in sums]).sum()
    whole.backward()
    count = sum(number for _, number in sums)
    assert count == int(batch["loss_mask"].sum())
    torch.testing.assert_close(loss / count, whole / count, atol=1e-5, rtol=1e-5)
    for name, one in plain.named_parameters():
        if one.grad is not None:
            torch.testing.assert_close(gradients[name], one.grad, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.name)
def test_a_microbatch_without_images_runs_the_tower_for_nothing(family: Family, folder: Path) -> None:  # noqa: F811
    model = model_of(family)
    (row,) = rows_of(family, folder, ["none"])
    root = HiddenStates(model)
    root.media = MediaInputs(base_of(model), processor_of(family), lambda one: pytest.fail(f"asks for {one}"))
    tokens = torch.from_numpy(row.tokens)[None]
    positions = torch.arange(len(row))[None]
    model.zero_grad()
    with_tower = root(tokens, positions, media=torch.zeros_like(tokens))
    torch.testing.assert_close(with_tower, root(tokens, positions))
    with_tower.sum().backward()
    tower = [one for name, one in model.named_parameters() if "vis" in name and one.requires_grad]
    assert tower and any(one.grad is not None for one in tower)
    assert all(one.grad is None or not one.grad.any() for one in tower)


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.name)
def test_a_sampled_placeholder_is_a_token_of_text(family: Family, folder: Path) -> None:  # noqa: F811
    """With the embedding of another token it gives what that one gives. transformers would want a further image."""
    model, (row,) = deepcopy(model_of(family)), rows_of(family, folder, ["one"])
    root = root_of(family, model, [row])
    (placeholder,) = processor_of(family).image_token_ids
    other = int(row.tokens[-2])
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[placeholder] = embedding[other]
    tokens, positions, ids = inputs_of(row)
    sampled = torch.where((tokens == other) & (ids == 0), placeholder, tokens)
    assert (sampled != tokens).any()
    torch.testing.assert_close(root(sampled, positions, media=ids), root(tokens, positions, media=ids))


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.name)
def test_images_are_processed_once_where_the_processor_treats_each_alone(family: Family, folder: Path) -> None:  # noqa: F811
    (row,), opened = rows_of(family, folder, ["several"]), list[int]()
    assert row.media is not None
    media = {medium.id: medium for medium in row.media.items}

    def open_image(number: int) -> Any:
        opened.append(number)
        return open_medium(media[number])

    inputs = MediaInputs(base_of(model_of(family)), processor_of(family), open_image)
    found = [inputs.arguments(*inputs_of(row)) for _ in range(3)]
    whole = processor_of(family)(images=[[open_medium(one) for one in row.media.items]], return_tensors="pt")
    for arguments in found:
        torch.testing.assert_close(arguments["pixel_values"], whole["pixel_values"], atol=0, rtol=0)
    alone = family.name != "Idefics3"  # which puts the tiles of a row's images in a dimension of their own
    assert len(opened) == (2 if alone else 4) * len(media)


def test_an_image_of_several_sequences_is_computed_once(folder: Path) -> None:  # noqa: F811
    """Hidden states are those of the sequences by themselves."""
    family, model = FAMILIES[0], deepcopy(model_of(FAMILIES[0]))
    rows = rows_of(family, folder, ["one", "the same twice", "one"])
    root = root_of(family, model, rows)
    seen: list[int] = []
    model.model.visual.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    batch = collate(rows, media=True)
    tokens, ids = torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["media"])
    positions = torch.arange(tokens.shape[1]).expand(len(rows), -1)
    together = root(tokens, positions, media=ids)
    for number, row in enumerate(rows):
        own = slice(number, number + 1), slice(len(row))
        torch.testing.assert_close(together[own], root(tokens[own], positions[own], media=ids[own]), atol=1e-5, rtol=1e-5)
    whole, first, second, _ = seen
    assert whole == first + second, "two different images, though four stand in the rows"
    assert "get_image_features" not in vars(model.model)


def test_packed_rows_with_equal_images_stay_together() -> None:
    """Each row is in one microbatch, and these have fewer different images than without groups."""
    rule = RULES["packed"]
    images, lengths = np.repeat(np.arange(4), 8), np.random.default_rng(0).integers(60, 140, 32)  # 0: none
    media = np.zeros((32, 140), np.int64)
    media[:, 1] = -images
    fields = {"tokens": np.ones_like(media), "lengths": lengths}

    def different(batch: Batch) -> int:
        plans = [[piece.row for row in plan for piece in row if piece.row >= 0] for plan in plan_rows(batch, rule, RANK)]
        assert sorted(row for plan in plans for row in plan) == list(range(32))
        assert all(lengths[plan].sum() <= rule.tokens for plan in plans)
        return sum(len(set(images[plan].tolist()) - {0}) for plan in plans)

    assert different(Batch({**fields, "media": media})) < different(Batch(fields))


def test_a_sequence_with_one_image_is_cut_as_its_processor_cuts_one() -> None:
    """LLaVA-OneVision's cuts it into tiles, and several images of a conversation not."""
    model, processor = make_image_model("LlavaOnevisionForConditionalGeneration", seed=0)
    images = {number: Image.new("RGB", (70, 40), (60 * number, 90, 30)) for number in (1, 2, 3)}
    inputs = MediaInputs(base_of(model), processor, images.__getitem__)
    media = torch.tensor([[-1, 1, 0, -2, -3, 0]])
    found = inputs.arguments(torch.zeros_like(media), torch.tensor([[0, 1, 2, 0, 1, 2]]), media)
    texts, given = ["<image>", "<image><image>"], [[images[1]], [images[2], images[3]]]
    whole = processor(text=texts, images=given, return_tensors="pt", padding=True)
    assert found["batch_num_images"].tolist() == [1, 2]
    torch.testing.assert_close(found["pixel_values"], whole["pixel_values"], atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["Qwen3_5", "Llama4"])
def test_the_class_is_the_one_that_a_checkpoint_names(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")()
    for name in (f"{kind}ForConditionalGeneration", f"{kind}ForCausalLM"):
        config.architectures = [name]
        assert find_class(PolicyConfig(), config, scalar=False).__name__ == name


def test_a_cache_keeps_the_latest_images_within_its_bytes() -> None:
    made: list[int] = []
    cache = MediaCache(lambda number: made.append(number) or "x" * number, len, most=10)
    for number in (3, 4, 3, 5, 3, 4, 11, 3):
        assert cache(number) == "x" * number
    assert made == [3, 4, 5, 4, 11, 3], "4 goes for 5, then 5 for 4; what is larger than all is not kept"


def test_a_cache_prepares_images_once_and_within_its_bytes() -> None:
    made: list[int] = []
    cache = MediaCache(lambda number: made.append(number) or "x" * number, len, most=60)
    cache(2)
    cache.prepare([5, 2, 5, 7])
    assert sorted(made) == [2, 5, 7] and cache(7) == "x" * 7 and cache(5) == "x" * 5 and len(made) == 3
    cache.prepare([31, 8])
    assert made[-1] == 31, "half of the bytes are made, and the rest when it is asked for"


def test_a_run_that_resumes_has_the_model_that_it_wrote(tmp_path: Path) -> None:
    """Of a model from a seed the checkpoint names the written `config.json`, and a run that resumes has its own keys."""
    policy = load_config(EXAMPLE).policy
    assert policy.random_init is not None
    tokenizer = load_tokenizer(policy)
    write_random_model(policy.random_init, tokenizer, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    mine = model_description(policy, token_count(tokenizer))
    assert FsdpBackend.computed(written) == FsdpBackend.computed(mine)
    other = json.loads(json.dumps(mine).replace('"num_heads": 4', '"num_heads": 2'))
    assert FsdpBackend.computed(written) != FsdpBackend.computed(other)


@pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.name)
def test_adapters_are_those_of_the_language_part(family: Family, folder: Path) -> None:  # noqa: F811
    """Hidden states are those of transformers' model with PEFT's own adapters, which has no others."""
    pytest.importorskip("peft")
    model, settings = deepcopy(model_of(family)), PeftConfig(enabled=True, dim=2)
    add_adapters(model, settings)
    held = Adapters(model, settings).held
    inside = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and ".layers." in name]
    language = [name for name in inside if "vis" not in name and "connector" not in name and ".lora_" not in name]
    assert sorted(held) == sorted(f"{name.removesuffix('.base_layer')}.weight" for name in language)
    for adapter in held.values():
        torch.nn.init.normal_(adapter.factors[1], generator=torch.Generator().manual_seed(1))
    (row,) = rows_of(family, folder, ["several"])
    tokens, positions, ids = inputs_of(row)
    found = model.get_output_embeddings()(root_of(family, model, [row])(tokens, positions, media=ids))
    turns = [turns_of(family, CONVERSATIONS["several"])]
    inputs = processor_of(family).apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    torch.testing.assert_close(found, model(**inputs).logits, atol=1e-4, rtol=1e-4)
    assert (found - model_of(family)(**inputs).logits).abs().max() > 0.01


GRPO: dict[str, Any] = {"algorithm": "grpo", "policy": {"generation": {"max_new_tokens": 4}}}
GRPO |= {"reward": {"function": "dagrl.rl.rewards:exact_match"}}
SEEN = "in models of type 'gemma3' the tokens of an image see each other, which vLLM's attention on CPUs does not do"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"algorithm": "reward_model"}, "critics and reward models read texts alone"),
        ({"policy": {"fsdp_cfg": {"tensor_parallel_size": 2}}}, "their model is not split"),
        ({"policy": {"backend": "megatron"}}, "Megatron workers take text alone; set policy.backend=fsdp"),
        ({**GRPO, "cluster": {"num_gpus": 0}}, SEEN),
        ({**GRPO, "models": {"teacher": {"backend": "fsdp"}}}, "the teacher reads text alone"),
    ],
    ids=["reward models", "tensor parallelism", "Megatron", "Gemma 3 in vLLM on CPUs", "a teacher"],
)
def test_runs_that_do_not_take_images_refuse_them(keys: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    given = {"name": "run", "algorithm": "sft", "data": {}, **keys}
    given |= {"policy": {"backend": "fsdp", **keys.get("policy", {})}}
    for teacher in keys.get("models", {}).values():
        teacher["model_name"] = str(tmp_path)
    config = Config.model_validate(given)
    model = {"model_type": "qwen3_vl", "vision_config": {}} if "models" in keys else {"model_type": "gemma3"}
    with pytest.raises(ConfigError, match=f"the run has images, but {expected}"):
        check_media(config, RunPlan.of(config), model)


def test_rows_with_other_images_share_no_prefix(folder: Path) -> None:  # noqa: F811
    turn, answer = CONVERSATIONS["one"]
    other = {"role": "user", "content": [{"type": "image", "image": "images/3.png"}, turn["content"][1]]}
    processor = MediaProcessor(processor_of(FAMILIES[0]))
    rows = [{"messages": [one, answer]} for one in (turn, turn, other)]
    batch = collate(encode_demonstrations(read(folder, rows), processor.tokenizer, "all", processor), media=True)
    assert (batch["tokens"][1] == batch["tokens"][2]).all()
    groups = prefix_groups(batch, 0.0)
    assert [group.rows for group in groups if group.saved] == [(0, 1)]


def test_no_prefix_ends_between_the_parts_of_an_image() -> None:
    """Idefics3 has text between the tiles of an image. Warm-ups put their prompts' ends anywhere."""
    media = np.array([[0, 0, -7, 7, 0, 0, 7, 7, 0, -8, 0, 0]] * 2)
    for end, shared in ((2, 2), (3, 2), (5, 2), (6, 2), (8, 8), (9, 9), (10, 10)):
        mask = np.tile(np.arange(12) > end, (2, 1)).astype(np.int64)
        fields = {"tokens": np.ones((2, 12), np.int64), "media": media, "loss_mask": mask, "lengths": np.array([12, 12])}
        assert [group.shared for group in prefix_groups(Batch(fields), 0.0)] == [shared], end


@pytest.mark.parametrize(("family", "reason"), [(FAMILIES[0], ""), (FAMILIES[1], "images whose tokens see each other")])
def test_images_whose_tokens_see_each_other_are_in_no_shared_prefix(family: Family, reason: str) -> None:
    hf_config, key = model_of(family).config.to_dict(), "policy.sequence_packing.shared_prefix"
    policy = {"backend": "fsdp", "sequence_packing": {"enabled": True}}
    given = {"name": "run", "algorithm": "sft", "data": {"images": {"enabled": True}}, "policy": policy}
    config = Config.model_validate(given)
    derived = Derived(config)
    derive_from_data(derived, [], [], hf_config, 0)
    assert reason in derived.reasons.get(key, "")
    assert derived.config.policy.sequence_packing.shared_prefix == ("auto" if not reason else False)
    with pytest.raises(ConfigError, match=f"shared_prefix is true, but the model has {reason}") if reason else nullcontext():
        check_model(config.with_keys({key: True}), hf_config)


def test_texts_alone_are_packed_by_a_model_with_positions_in_several_dimensions() -> None:
    """Qwen2.5-VL makes masks from positions of text, which it has only next to the others."""
    model, _ = make_image_model("Qwen2_5_VLForConditionalGeneration", seed=0)
    model.eval().set_attn_implementation("sdpa")
    check_separation(HiddenStates(model), torch.device("cpu"))
    assert not unseparated(type(model), model.config, "sdpa", images=False)
    tokens = torch.randint(8, 50, (2, 11))
    found = HiddenStates(model)(tokens, torch.arange(11).expand(2, -1))
    torch.testing.assert_close(found, model.model(input_ids=tokens, use_cache=False).last_hidden_state)
