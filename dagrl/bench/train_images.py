"""Trains architectures that take images on two data-parallel ranks, and compares with plain torch.

    python -m dagrl.bench.train_images --json F                  the rows that F lacks
    python -m dagrl.bench.train_images --json F --names Gemma3ForConditionalGeneration    some of them, again

Each is a tiny model of `dagrl.bench.image_models` with random float32 weights. FSDP workers take three SFT steps on rows
with one image, several, or none, padded and packed. Losses and gradient norms must be those of transformers and AdamW in one
process, row by row, on what the model's own processor makes of text and images: to 1e-5, and to one part in 1e4.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dagrl.bench.forked import reason_of, run_forked
from dagrl.bench.image_models import MODELS, make_image_model
from dagrl.bench.train_architectures import (
    LAYOUTS,
    MemberError,
    TrainRow,
    adam_steps,
    compare,
    make_config,
    members,
    together,
)
from dagrl.config import Config
from dagrl.data.encoder import TextEncoder
from dagrl.data.media import MEDIA, MediaProcessor, MediaStore, Medium, id_of
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows
from dagrl.telemetry.metrics import merge_step_metrics
from dagrl.telemetry.record import RunPaths
from dagrl.workers.fsdp import FsdpWorker

LAYOUT = "dp2"
WIDTH = 512
PACKED = {"enabled": True, "train_mb_tokens": 2 * WIDTH, "logprob_mb_tokens": 2 * WIDTH}
PICTURES = [[(40, 70)], [], [(64, 64), (33, 90)], [(96, 32)]]
"""Heights and widths of each row's images."""


def main() -> None:
    """Writes a row for each architecture as soon as it is done."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--names", nargs="+", choices=MODELS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    torch.set_num_threads(1)
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    rows = {row["architecture"]: TrainRow(**row) for row in known}
    for name in options.names or [name for name in MODELS if name not in rows]:
        with tempfile.TemporaryDirectory() as root:
            reason = run_forked(_train, (name, Path(root)), options.seconds)
            report = Path(root, "row.json")
            row = TrainRow(**json.loads(report.read_text())) if report.exists() else TrainRow(name, LAYOUT, False, reason)
        rows[name] = row
        sys.stdout.write(f"{'passed' if row.passed else 'FAILED'} {row.architecture} {row.reason}\n")
        sys.stdout.flush()
        if options.json:
            text = ",\n".join(json.dumps(asdict(rows[name])) for name in MODELS if name in rows)
            options.json.write_text(f"[\n{text}\n]\n")
    sys.stdout.write(f"{sum(row.passed for row in rows.values())} of {len(rows)} passed\n")


def _train(name: str, root: Path) -> None:
    try:
        row = _row(name, root)
    except Exception as error:
        row = TrainRow(name, LAYOUT, False, reason_of(error))
    (root / "row.json").write_text(json.dumps(asdict(row)))


def _row(name: str, root: Path) -> TrainRow:
    model, processor = make_image_model(name, seed=0)
    model.save_pretrained(root / "model")
    processor.save_pretrained(root / "model")
    batch, inputs = make_rows(
        MediaProcessor(processor), MediaStore(RunPaths.of(_config(root, {})).media, _config(root, {}).data.images)
    )
    truth = adam_steps(model, _config(root, {}).policy.optimizer, [lambda: _plain_loss(model, batch, inputs)] * 3)
    differences, reason = list[float](), ""
    for packing in ({}, PACKED):
        try:
            steps = sharded_steps(_config(root, packing), batch)
        except MemberError as error:
            if packing and "see each other" in str(error):  # so do workers when they start
                reason = "padded rows alone: transformers' masks of this class do not tell packed sequences apart"
                break
            return TrainRow(name, LAYOUT, False, f"{'packed' if packing else 'padded'}: {error}")
        difference, wrong = compare(steps, truth)
        if wrong:
            return TrainRow(name, LAYOUT, False, f"{'packed' if packing else 'padded'}: {wrong}")
        differences.append(difference)
    return TrainRow(name, LAYOUT, True, reason, max(differences))


def _config(root: Path, packing: Mapping[str, Any]) -> Config:
    config = make_config(root / "model", LAYOUTS[LAYOUT], packing)
    return config.with_keys(
        {"output_dir": str(root), "data.images.enabled": True, "policy.max_total_sequence_length": WIDTH}
    )


def make_rows(processor: MediaProcessor, store: MediaStore) -> tuple[Batch, list[dict[str, Tensor]]]:
    """Returns rows with images, which it adds to the store, and what the model's processor makes of each."""
    from PIL import Image

    generator, encoder = np.random.default_rng(3), TextEncoder(processor.tokenizer)
    rows, inputs = [], []
    for sizes in PICTURES:
        images = [Image.fromarray(generator.integers(0, 255, (*size, 3), np.uint8)) for size in sizes]
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


def sharded_steps(config: Config, batch: Batch) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step of FSDP workers."""
    layout, steps = config.policy.train_layout, []
    shards = [batch.select(rows) for rows in split_rows(batch["lengths"], layout.dp)]
    with members(FsdpWorker, config, layout) as ranks:
        for _ in range(3):
            own = [(shards[layout.coordinates(rank).dp], "likelihood") for rank in range(layout.world_size)]
            step = merge_step_metrics(together(ranks, "train_step", own)).flat()
            steps.append((step["loss"], step["grad_norm"]))
    return steps


if __name__ == "__main__":
    main()
