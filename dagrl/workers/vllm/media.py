"""Images of requests as vLLM's engine takes them: our tokens, the model's tensors of each image, and where it stands.

The tokens of a request are those of its data (`dagrl.data.media`), so they are never expanded again. vLLM's processor makes
the tensors of an image, once for all requests that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dagrl.data.media import MediaCache, name_of
from dagrl.workers.vllm.features import item_bytes, keep_covered_images, processed_image

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm import LLMEngine


def media_spans(media: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns the id of each medium of a request, in order, and its first token and the token after its last.

    Example: `media_spans([0, -7, 7, 0, 7, -7, 0])` is `[(7, 1, 5), (7, 5, 6)]`.
    """
    firsts = [place for place, medium in enumerate(media) if medium < 0]
    spans = []
    for first, end in pairwise([*firsts, len(media)]):
        medium = -media[first]
        last = max((place for place in range(first + 1, end) if media[place] == medium), default=first)
        spans.append((medium, first, last + 1))
    return spans


class EngineMedia:
    """Makes the engine inputs of requests with images. `open_image` returns an image by its id."""

    def __init__(self, engine: LLMEngine, open_image: Callable[[int], Image]) -> None:
        keep_covered_images()
        processor = engine.renderer.get_mm_processor()
        self._item = MediaCache(lambda medium: processed_image(processor, name_of(medium), open_image(medium)), item_bytes)

    def prepare(self, requests: Iterable[Sequence[int]]) -> None:
        """Makes the tensors of the images of requests, by the media of their tokens, several at once."""
        self._item.prepare(-medium for media in requests for medium in media if medium < 0)

    def input(self, tokens: Sequence[int], media: Sequence[int], cache_salt: str) -> Any:
        """Returns the engine's input of `tokens`, of which those with an id in `media` stand for that image."""
        import torch
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        spans, places = media_spans(media), []
        for medium, start, end in spans:
            stands = torch.tensor([abs(one) == medium for one in media[start:end]])
            places.append(PlaceholderRange(offset=start, length=end - start, is_embed=None if stands.all() else stands))
        ids = [medium for medium, _, _ in spans]
        return mm_input(
            list(tokens),
            MultiModalKwargsItems({"image": [self._item(medium) for medium in ids]}),
            {"image": [name_of(medium) for medium in ids]},
            {"image": places},
            cache_salt=cache_salt,
        )
