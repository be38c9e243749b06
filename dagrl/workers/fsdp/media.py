"""What a model's forward pass takes for the images of a microbatch: pixels, grids, types of tokens and positions.

The images are those whose tokens are in the microbatch (`dagrl.data.media`), row by row. The model's own processor makes the
tensors of all of them at once, each sequence a conversation. Imported only where torch is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dagrl.config import Config
from dagrl.data.media import MediaCache, MediaStore, load_processor
from dagrl.telemetry.record import RunPaths
from dagrl.workers.fsdp.attention import TORCH_VARLEN
from dagrl.workers.fsdp.output import base_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments that say which tokens are images: 1, or 0 for text."""

BLANK = (64, 64)
"""Size of the image that stands for none."""


def make_media_inputs(net: Any, config: Config) -> MediaInputs:
    """Makes those of a run's model, whose images are in the run's directory. `torch_varlen` takes no masks."""
    base, policy = base_of(net), config.policy
    inputs = MediaInputs(
        base,
        load_processor(Path(policy.tokenizer.name or policy.model_name or "")),
        MediaStore(RunPaths.of(config).media, config.data.images).open,
    )
    if inputs.masks and net.config._attn_implementation == TORCH_VARLEN:
        net.set_attn_implementation("sdpa")
    return inputs


class MediaInputs:
    """Makes the arguments of `base`, the part of a model below its head. `open_image` returns an image by its id."""

    def __init__(self, base: nn.Module, processor: ProcessorMixin, open_image: Callable[[int], Image]) -> None:
        self._base: Any = base
        self._processor, self._open_image = processor, open_image
        tokenizer: Any = processor.tokenizer
        if tokenizer.pad_token is None:  # texts are padded to the longest, and read by nobody
            tokenizer.pad_token = tokenizer.eos_token
        self._made = MediaCache(self._alone, lambda tensors: sum(one.nbytes for one in tensors.values()))
        # Whether tensors of several images are those of each, one after the other; and if a sequence has several of them.
        self._joins: dict[bool, bool] = {}
        self._given: tuple[Tensor, Tensor] | None = None
        embedding: nn.Module = cast(Any, base).get_input_embeddings()
        embedding.register_forward_pre_hook(self._embed_as_given)
        self._known = {*inspect.signature(base.forward).parameters} - {"input_ids", "attention_mask", "position_ids"}
        self.masks = "token_type_ids" in self._known  # tokens of an image see each other
        self._placeholders = sorted(processor.image_token_ids)
        self._ropes = hasattr(base, "get_rope_index")  # positions of images in several dimensions

    def arguments(self, tokens: Tensor, positions: Tensor, media: Tensor) -> dict[str, Any]:
        """Returns all arguments besides tokens, also `position_ids`. `media` [b, s] are the ids of the tokens' media."""
        types = (media != 0).int()
        arguments: dict[str, Any] = {name: types for name in TYPES if name in self._known}
        # Sequences of a row are told apart by positions of text, next to which models with others want their own.
        arguments["position_ids"] = positions[None].expand(4, *positions.shape) if self._ropes else positions
        firsts, sequences = media < 0, (positions == 0).flatten().cumsum(0).view(positions.shape)
        shown = zip(sequences[firsts].tolist(), (-media[firsts]).tolist(), strict=True)
        groups = [[medium for _, medium in own] for _, own in groupby(shown, key=itemgetter(0))]
        if not groups:
            return arguments
        arguments |= {name: value.to(tokens.device) for name, value in self._tensors(groups).items()}
        if self._ropes:
            arguments["position_ids"] = self._rope_positions(tokens, positions, media, arguments)
        return arguments

    @contextmanager
    def input_ids(self, tokens: Tensor, media: Tensor) -> Iterator[Tensor]:
        """Context for a forward pass on the ids that it returns.

        Placeholders in a text, which a policy may sample, get another id there: models look for images by tokens alone. They
        keep their own embedding.
        """
        texts = torch.isin(tokens, torch.tensor(self._placeholders, device=tokens.device)) & (media == 0)
        other = next(token for token in count() if token not in self._placeholders)
        self._given = texts, tokens
        try:
            yield torch.where(texts, other, tokens)
        finally:
            self._given = None

    def _embed_as_given(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._given is None:
            return arguments
        texts, tokens = self._given
        return torch.where(texts, tokens, arguments[0]), *arguments[1:]

    def nothing(self, device: torch.device) -> Tensor:
        """Returns 0, computed from a blank image: without any, a rank takes part in the vision tower's collectives too."""
        from PIL import Image

        blank = {name: value.to(device) for name, value in self._processed([[Image.new("RGB", BLANK)]]).items()}
        features = self._base.get_image_features(**blank, return_dict=True)
        parts = features.pooler_output
        whole: Tensor = parts if isinstance(parts, Tensor) else torch.cat([*parts])
        deep = [part for layer in getattr(features, "deepstack_features", None) or () for part in layer]
        return sum([one.sum() for one in deep], whole.sum()) * 0.0

    def _tensors(self, media: list[list[int]]) -> dict[str, Tensor]:
        """Returns what the processor makes of the images of each sequence that has some, as far as the model takes it.

        Those of each image are kept, if the processor puts them one after the other; the first microbatch with several says.
        """
        several, every = any(len(own) > 1 for own in media), [medium for own in media for medium in own]
        joins = self._joins.get(several)
        joined = None if joins is False else _joined([self._made(medium) for medium in every])
        if joined is not None and (joins or len(every) == 1):
            return joined
        whole = self._processed([[self._open_image(medium) for medium in own] for own in media])
        if joins is None:
            self._joins[several] = joined is not None and all(torch.equal(whole[name], joined[name]) for name in whole)
        return whole

    def _alone(self, medium: int) -> dict[str, Tensor]:
        return self._processed([[self._open_image(medium)]])

    def _processed(self, images: list[list[Image]]) -> dict[str, Tensor]:
        texts = [str(self._processor.image_token) * len(own) for own in images]  # InternVL's takes no images without
        output = self._processor(text=texts, images=images, padding=True, return_tensors="pt")
        return {name: value for name, value in output.items() if name in self._known and name not in TYPES}

    def _rope_positions(self, tokens: Tensor, positions: Tensor, media: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Returns positions [4, b, s]: those of text, by which sequences of a row are told apart, and the model's own three.

        Sequences begin where positions do. The model's function takes one sequence at a time, and reads it on the host.
        """
        shape, grids = tokens.shape, arguments["image_grid_thw"].cpu()
        flat = [one.flatten().cpu() for one in (tokens, positions, media)]
        starts = [*torch.nonzero(flat[1] == 0).flatten().tolist(), len(flat[0])]
        parts, first = [], 0
        for start, end in pairwise(starts):
            ids, own = flat[0][None, start:end], flat[2][None, start:end]
            images = int((own < 0).sum())
            own_grids = grids[first : first + images] if images else None
            found, _ = self._base.get_rope_index(ids, mm_token_type_ids=(own != 0).int(), image_grid_thw=own_grids)
            parts.append(found[:, 0])
            first += images
        own = torch.cat(parts, dim=1).view(3, *shape).to(positions.device)
        return torch.cat([positions[None], own])


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """Returns the tensors of several images, one after the other; None if their shapes do not fit."""
    try:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    except RuntimeError:
        return None
