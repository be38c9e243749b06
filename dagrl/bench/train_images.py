"""Trains architectures that take images on two data-parallel ranks, and compares with plain torch.

    python -m dagrl.bench.train_images --json F                  the rows that F lacks
    python -m dagrl.bench.train_images --json F --names Gemma3ForConditionalGeneration    some of them, again

Each is a tiny model of `dagrl.bench.image_models` with random float32 weights. FSDP workers take three SFT steps on rows
with one image, several, or none, padded and packed. Losses and gradient norms must be those of transformers and AdamW in one
process, row by row, on what the model's own processor makes of text and images: to 1e-5, relative to values above 1.
"""

import io
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dagrl.bench.image_models import MODELS, make_image_model
from dagrl.bench.train_architectures import Case, adam_steps, make_config, run_table
from dagrl.data.encoder import TextEncoder
from dagrl.data.media import MEDIA, MediaProcessor, MediaStore, Medium, id_of
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.record import RunPaths

WIDTH = 512
PACKED = {"enabled": True, "train_mb_tokens": 2 * WIDTH, "logprob_mb_tokens": 2 * WIDTH}
PICTURES = [[(40, 70)], [], [(64, 64), (33, 90), (64, 64)], [(96, 32)], [(40, 70)], [(96, 32)]]
"""Heights and widths of each row's images. Those of one size are equal, as in the samples of a prompt."""


def main() -> None:
    """Tries all models with images."""
    run_table(str(__doc__), list(MODELS), ["dp2"], _case)


def _case(name: str, root: Path) -> Case:
    model, processor = make_image_model(name, seed=0)
    model.save_pretrained(root / "model")
    processor.save_pretrained(root / "model")
    keys = {"output_dir": str(root), "data.images.enabled": True, "policy.max_total_sequence_length": WIDTH}
    config = make_config(root / "model", {}, {}).with_keys(keys)
    store = MediaStore(RunPaths.of(config).media, config.data.images)
    batch, inputs = make_rows(MediaProcessor(processor), store)
    truth = adam_steps(model, config.policy.optimizer, [lambda: _plain_loss(model, batch, inputs)] * 3)
    return Case(root / "model", batch, truth, ("likelihood",) * 3, PACKED, keys, generates=False)


def make_rows(processor: MediaProcessor, store: MediaStore) -> tuple[Batch, list[dict[str, Tensor]]]:
    """Returns rows with images, which it adds to the store, and what the model's processor makes of each."""
    from PIL import Image

    generator, encoder = np.random.default_rng(3), TextEncoder(processor.tokenizer)
    drawn = {size: Image.fromarray(generator.integers(0, 255, (*size, 3), np.uint8)) for size in chain(*PICTURES)}
    rows, inputs = [], []
    for sizes in PICTURES:
        images = [drawn[size] for size in sizes]
        media = []
        for image, size in zip(images, sizes, strict=True):
            file = io.BytesIO()
            image.save(file, "PNG")
            media.append(Medium(file.getvalue(), id_of(file.getvalue()), size))
        store.add(media)
        words = [f"w{number}" for number in generator.integers(0, 90, 12)]
        for place in range(len(images)):
            words.insert(2 + 4 * place, processor.placeholder)
        text = " ".join(words)
        made = processor.processor(text=[text], images=[images] if images else None, return_tensors="pt")
        _, ids, shown = processor.row(text, media, encoder, "a row")
        if ids != made["input_ids"][0].tolist():
            raise ValueError("the tokens of a row are not those of the processor")
        rows.append((np.array(ids), np.zeros(len(ids), np.int64) if shown is None else shown.tokens))
        inputs.append(dict(made))
    lengths = np.array([len(ids) for ids, _ in rows])
    fields: dict[str, Any] = {name: np.zeros((len(rows), lengths.max()), np.int64) for name in ("tokens", MEDIA)}
    for number, (own, standing) in enumerate(rows):
        fields["tokens"][number, : len(own)], fields[MEDIA][number, : len(own)] = own, standing
    inside = (np.arange(lengths.max()) < lengths[:, None]) & (np.arange(lengths.max()) > 0)
    mask = (inside & (fields[MEDIA] == 0)).astype(np.float32)
    scalars = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(len(rows))}
    return Batch({**fields, "lengths": lengths, "loss_mask": mask}, scalars), inputs


def _plain_loss(model: Any, batch: Batch, inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
    total = torch.zeros(())
    for row, made in enumerate(inputs):
        logits = model(**made, use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, made["input_ids"][0, 1:, None])[:, 0]
        total = total - (logprobs * torch.tensor(batch["loss_mask"][row, 1 : len(logprobs) + 1])).sum()
    return total / batch.number("global_valid_tokens")


if __name__ == "__main__":
    main()
