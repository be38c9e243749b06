"""Experts of each token, which an engine records, and images of requests, whose prefixes equal images alone share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.data.media import MediaProcessor, MediaStore, Medium, id_of
from dagrl.data.tokenization import encode_prompts
from dagrl.rl.routed_experts import MISSING
from dagrl.telemetry.record import RunPaths
from tests.integration import vllm_calls
from tests.integration.vllm_models import chosen, make_checkpoint, make_config
from tests.integration.vllm_ranks import Ranks, requests
from tests.unit.data.processors import FAMILIES, processor_of
from tests.unit.data.test_media import SIZES, folder, image, picture, png, read, text, turns_of  # noqa: F401
from tests.unit.workers.test_fsdp_media import model_of


def test_recorded_experts_match_hugging_face(vllm_ranks: Ranks, tmp_path: Path) -> None:
    """Of prompts and completions, also where the prefix cache had the prompt; the last token is not computed."""
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3_moe", max_position_embeddings=128)
    generation = {"vllm_cfg": {"max_num_seqs": 8, "kv_cache_memory_bytes": 8 << 20}, "vllm_kwargs": {"block_size": 32}}
    config = make_config(checkpoint, generation, length=96)
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"router_replay": True})})
    prompt = [5 + number % 80 for number in range(70)]
    with vllm_ranks.engine(config, 1) as engine:
        first = engine.run(requests([1, 2], [prompt, prompt[:7]]))
        assert not len(engine.generate(requests([3], [[*prompt[:66], 9, 8, 7]], steps=1)))
        assert engine.on_all(vllm_calls.first_computed) == [64], "two blocks of the prompt are cached"
        second = engine.run(requests([], []))
    truth = hf_experts(checkpoint, [[*prompt, *first[0].tokens], [*prompt[:7], *first[1].tokens]])
    truth += hf_experts(checkpoint, [[*prompt[:66], 9, 8, 7, *second[0].tokens]])
    for row, experts in zip([*first, *second], truth, strict=True):
        assert row.experts is not None
        found = row.experts.reshape(-1, 2, 2)  # tokens, layers, chosen
        np.testing.assert_array_equal(np.sort(found[:, 0], -1), np.sort(experts[:-1], -1))
        assert (found[:, 1] == MISSING).all(), "the second layer is dense"


def hf_experts(checkpoint: Path, sequences: list[list[int]]) -> list[Any]:
    """Returns the experts [tokens, top k] that the first layer of transformers' model chooses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found: list[Any] = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2].numpy()))
    with torch.no_grad():
        for sequence in sequences:
            model(torch.tensor([sequence]))
    return found


BLOCK = 32
QUESTION = "it is the hello and " * 12


@pytest.mark.slow
def test_equal_images_share_a_prefix_and_others_of_their_size_do_not(
    vllm_ranks: Ranks,
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Log-probabilities are transformers' for each image, whatever the cache had."""
    family, model = FAMILIES[0], model_of(FAMILIES[0])
    model.save_pretrained(tmp_path / "model")
    processor_of(family).save_pretrained(tmp_path / "model")
    conversations = [[{"role": "user", "content": [text(QUESTION), image(number), text(QUESTION)]}] for number in (0, 3)]
    examples = read(folder, [{"messages": [*one, {"role": "assistant", "content": "it"}]} for one in conversations])
    prompts = encode_prompts(examples, processor_of(family).tokenizer, MediaProcessor(processor_of(family)))
    generation = {"vllm_cfg": {"max_num_seqs": 4, "kv_cache_memory_bytes": 32 << 20}, "vllm_kwargs": {"block_size": BLOCK}}
    config = make_config(tmp_path / "model", generation, length=512)
    config = config.with_keys({"data.images.enabled": True, "output_dir": str(tmp_path)})
    media = [Medium(png(number), id_of(png(number)), SIZES[number]) for number in (0, 3)]
    MediaStore(RunPaths.of(config).media, config.data.images).add(media)
    rows = []
    with vllm_ranks.engine(config, 1) as engine:
        for number in (0, 0, 1):
            prompt = prompts[number]
            assert prompt.media is not None
            batch = requests([len(rows)], [prompt.tokens.tolist()], new=6, steps=8, greedy=True)
            batch = batch.with_fields(media=prompt.media.tokens[None])
            [(made, hits)] = engine.on_all(vllm_calls.generate_with_hits, batch)
            rows.append((prompt, made.request(0), hits))
        batch = requests([len(rows)], [prompts[0].tokens.tolist()], new=6, steps=2, greedy=True)
        assert prompts[0].media is not None and not len(
            engine.generate(batch.with_fields(media=prompts[0].media.tokens[None]))
        )
        engine.on_all(vllm_calls.recompute)
        (again,) = engine.run(requests([], []))  # its images are computed again, of which it had found all in the cache
    np.testing.assert_array_equal(again.tokens, rows[0][1].tokens)
    np.testing.assert_allclose(again.logprobs, rows[0][1].logprobs, atol=1e-5)
    length, first = len(prompts[0].tokens), int(np.flatnonzero(prompts[0].media.tokens)[0])  # type: ignore[union-attr]
    assert BLOCK < first and [hits for *_, hits in rows] == [[0], [(length - 1) // BLOCK * BLOCK], [first // BLOCK * BLOCK]]
    for (_, row, _), number in zip(rows, (0, 0, 3), strict=True):
        turns = [{"role": "user", "content": [text(QUESTION), {"type": "image", "image": picture(number)}, text(QUESTION)]}]
        inputs = processor_of(family).apply_chat_template(
            [turns], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        new = torch.as_tensor(np.asarray(row.tokens))[None]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], new], -1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, new.shape[1]))
        with torch.no_grad():
            logits = model(**inputs).logits[0, -new.shape[1] - 1 : -1]
        expected = chosen(logits.log_softmax(-1), new[0].tolist())
        np.testing.assert_allclose(row.logprobs, expected.numpy(), atol=1e-5)
    assert not np.allclose(rows[0][1].logprobs, rows[2][1].logprobs, atol=1e-3)
