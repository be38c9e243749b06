"""What a model's forward pass takes for the images of a microbatch: pixels, grids, types of tokens and positions.

The images are those whose tokens are in the microbatch (`dagrl.data.media`), row by row. The model's own processor makes the
tensors of all of them at once, each sequence a conversation. Where the tower computes each image by itself, one that several
sequences have, as those of a group do, is computed once. Imported only where torch is.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dagrl.config import Config
from dagrl.data.media import MediaCache, MediaStore, load_processor
from dagrl.telemetry.record import RunPaths
from dagrl.workers.fsdp.attention import TORCH_VARLEN
from dagrl.workers.fsdp.output import base_of
from dagrl.workers.train.microbatches import Segments

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin

TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments that say which tokens are images: 1, or 0 for text
BLANK = (64, 64)  # size of the image that stands for none


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


def takes_types(base: nn.Module) -> bool:
    """Whether tokens of an image see each other, so that the model says in masks which ones they are."""
    return "token_type_ids" in inspect.signature(base.forward).parameters


def has_ropes(base: nn.Module) -> bool:
    """Whether tokens of an image have positions in several dimensions."""
    return hasattr(base, "get_rope_index")


def text_positions(base: nn.Module, positions: Tensor) -> Tensor:
    """Returns positions [b, s] as a model takes them that has others for images: next to those of its own, [4, b, s].

    Sequences of a row are told apart by the first ones, those of text.
    """
    return positions[None].expand(4, *positions.shape) if has_ropes(base) else positions


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
        self.masks = takes_types(base)
        self._placeholders = sorted(processor.image_token_ids)
        self._ropes = has_ropes(base)  # and features of each image
        self._repeats: list[int] = []  # the number of each image of a microbatch among different ones, if some are equal

    def prepare(self, media: Iterable[Tensor | None]) -> None:
        """Makes the tensors of the images of microbatches, by their tokens' media, several at once.

        Each microbatch would else wait for its own, and the GPU with it.
        """
        ids = [one[one < 0] for one in media if one is not None]
        if ids and False not in self._joins.values():
            self._made.prepare((-torch.cat(ids)).tolist())

    def arguments(
        self, tokens: Tensor, positions: Tensor, media: Tensor, segments: Segments | None = None
    ) -> dict[str, Any]:
        """Returns all arguments besides tokens, also `position_ids`. `media` [b, s] are the ids of the tokens' media.

        `segments` tell sequences apart that share prefixes, positions all others.
        """
        types = (media != 0).int()
        arguments: dict[str, Any] = {name: types for name in TYPES if name in self._known}
        arguments["position_ids"] = text_positions(self._base, positions)
        runs, shown, conversations = _runs(positions, segments), media.flatten().cpu(), defaultdict[int, list[int]](list)
        for prefix, own in runs:  # with images in a prefix, those of its sequences follow them
            home = prefix if (shown[prefix] < 0).any() else own
            conversations[home.start] += (-shown[own][shown[own] < 0]).tolist()
        groups = [own for own in conversations.values() if own]
        self._repeats = []
        if not groups:
            return arguments
        every = [medium for own in groups for medium in own]
        numbers = {medium: number for number, medium in enumerate(dict.fromkeys(every))}
        places = [numbers[medium] for medium in every]
        if self._ropes and len(numbers) < len(every):
            groups, self._repeats = [[medium] for medium in numbers], places
        tensors = self._tensors(groups)
        arguments |= {name: value.to(tokens.device) for name, value in tensors.items()}
        if self._ropes:
            grids = tensors["image_grid_thw"][self._repeats or slice(None)]
            arguments["position_ids"] = self._rope_positions(tokens, positions, shown, grids, runs)
        return arguments

    @contextmanager
    def input_ids(self, tokens: Tensor, media: Tensor) -> Iterator[Tensor]:
        """Context for a forward pass on the ids that it returns, with the `arguments` of the same microbatch.

        Placeholders in a text, which a policy may sample, get another id there: models look for images by tokens alone. They
        keep their own embedding.
        """
        texts = torch.isin(tokens, torch.tensor(self._placeholders, device=tokens.device)) & (media == 0)
        other = next(token for token in count() if token not in self._placeholders)
        self._given = texts, tokens
        if self._repeats:
            self._base.get_image_features = partial(_repeated, self._base.get_image_features, self._repeats)
        try:
            yield torch.where(texts, other, tokens)
        finally:
            self._given = None
            if self._repeats:
                del self._base.get_image_features  # that of its class again

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

    def _rope_positions(
        self, tokens: Tensor, positions: Tensor, shown: Tensor, grids: Tensor, runs: Sequence[tuple[slice, slice]]
    ) -> Tensor:
        """Returns positions [4, b, s]: those of text, by which sequences of a row are told apart, and the model's own three.

        `shown` are the ids of media, flattened, `grids` [images, 3] those of all images. The model's function takes one
        sequence at a time, and reads it on the host.
        """
        ids, parts = tokens.flatten().cpu(), []
        numbers = (shown < 0).cumsum(0) - 1  # of the image that a token belongs to
        for prefix, own in runs:
            text, types, first = (torch.cat([one[prefix], one[own]])[None] for one in (ids, shown, numbers))
            images = grids[first[types < 0]] if (types < 0).any() else None
            found, _ = self._base.get_rope_index(text, mm_token_type_ids=(types != 0).int(), image_grid_thw=images)
            parts.append(found[:, 0, prefix.stop - prefix.start :])
        three = torch.cat(parts, dim=1).view(3, *tokens.shape).to(positions.device)
        return torch.cat([positions[None], three])


def _runs(positions: Tensor, segments: Segments | None) -> list[tuple[slice, slice]]:
    """Returns where each sequence is in a flattened microbatch, after where its shared prefix is, which may be empty."""
    none = slice(0, 0)
    if segments is None or segments.prefixes is None:
        starts = [*torch.nonzero(positions.flatten().cpu() == 0).flatten().tolist(), positions.numel()]
        return [(none, slice(*run)) for run in pairwise(starts)]
    own = [slice(*run) for run in pairwise(accumulate(segments.query_lengths, initial=0))]
    return [(none if head < 0 else own[head], one) for head, one in zip(segments.heads, own, strict=True)]


def _repeated(compute: Callable[..., Any], places: list[int], *arguments: Any, **options: Any) -> Any:
    """Returns the features of images, of which `compute` has each once, in these places."""
    features = compute(*arguments, **options)
    parts: Sequence[Tensor] = features.pooler_output  # of each image
    features.pooler_output = tuple(parts[place] for place in places)
    if (deep := getattr(features, "deepstack_features", None)) is not None:
        features.deepstack_features = [_in_places(layer, [len(part) for part in parts], places) for layer in deep]
    return features


def _in_places(layer: Tensor | Sequence[Tensor], sizes: list[int], places: list[int]) -> Tensor | tuple[Tensor, ...]:
    """Returns features of images, in these places, in one tensor if they were in one."""
    parts = torch.split(layer, sizes) if isinstance(layer, Tensor) else layer
    chosen = tuple(parts[place] for place in places)
    return torch.cat(chosen) if isinstance(layer, Tensor) else chosen


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """Returns the tensors of several images, one after the other; None if their shapes do not fit."""
    if len(parts) == 1:  # without a copy of its pixels
        return parts[0]
    try:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    except RuntimeError:
        return None
