"""Images of messages: where they come from, and their places among the tokens of a row.

A message with images has a list of parts as its content, as in OpenAI's format. Their images are one of

    {"type": "image", "image": "shapes/1.png"}                              # relative to the data file, or absolute
    {"type": "image", "image": {"bytes": ..., "path": ...}}                 # a Parquet file's, and those of `datasets.Image`
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}  # or a `file://` URL
    {"type": "image"}                                                       # the next one of the column `data.image_key`

Without any such part, the images of that column stand in front of the first user turn. Nothing is fetched from a network.
A row has the tokens that the model's own processor gives (`MediaProcessor`). Needs Pillow.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from os import cpu_count
from pathlib import Path
from sys import intern
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt

from dagrl.data.encoder import Encoded, TextEncoder
from dagrl.errors import ConfigError, DataError
from dagrl.files import replacing
from dagrl.runtime.shapes import Batch

if TYPE_CHECKING:
    from PIL import Image as Pillow
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

    from dagrl.config import ImagesConfig, Json

Part = Mapping[str, Any]  # a part of a message: a text, or an image. Once images are read, these are `IMAGE` alone

IMAGE: Part = {"type": "image"}

PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"),
    "video_preprocessor_config.json",  # transformers asks for it where torchvision is installed
)
"""Files that may name the class of a processor."""

KEPT_BYTES = 2 << 30  # bytes of the tensors of images that a worker keeps: an image of full HD may take 50 MB
THREADS = min(8, cpu_count() or 1)  # images that a worker prepares at once

Value = TypeVar("Value")

KNOWN_SIZES = 1 << 16  # sizes of images that a store keeps, so that it need not decode them again

ROUGHLY = {"do_rescale": False, "do_normalize": False, "resample": 0}
"""Settings of a processor whose pixels nobody reads: its texts take a fifth of the time."""

MEDIA = "media"  # name of the token field of batches with `RowMedia.tokens`
FULLEST = "fullest.npz"  # file of a store with the row of the data that has most tokens of images

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Medium:
    """An image of a message. `data` is the encoded file, or its path; `size` is its height and width in pixels, upright and
    within `data.images.max_pixels`. Equal data have equal ids, from 1 on.
    """

    data: bytes | Path
    id: int
    size: tuple[int, int]

    @property
    def name(self) -> str:
        """Name of its file in a run's directory of media."""
        return name_of(self.id)


@dataclass(frozen=True)
class RowMedia:
    """The media of a row, in their order, and `tokens` [sequence] int64: the id of the medium of which a token stands for a
    part, 0 for text. The first token of each medium has its id negated, so that equal neighbours are told apart.
    """

    items: tuple[Medium, ...]
    tokens: npt.NDArray[np.int64]

    def padded(self, before: int, after: int) -> RowMedia:
        """Returns the same with tokens of text before and after the row."""
        return RowMedia(self.items, np.pad(self.tokens, (before, after)))


def parts_of(content: Sequence[Any], where: str) -> tuple[Part, ...]:
    """Reads a content of several parts, some of which are images; `data` of an image stays as it is. Raises DataError."""
    return tuple(_part(part, f"{where}, part {number}") for number, part in enumerate(content, start=1))


def _part(part: Any, where: str) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        url = part.get("image_url")
        return {**IMAGE, "image": url.get("url") if isinstance(url, dict) else url}
    if kind == "image":
        given = [part[key] for key in ("image", "url", "path") if part.get(key) is not None]
        return {**IMAGE, "image": given[0]} if given else IMAGE
    raise DataError(f"{where} is {part!r:.80}; expected: a text, or an image as 'image' or 'image_url'")


def is_image(part: Part) -> bool:
    """Whether a part of a message is an image."""
    return bool(part["type"] == "image")


def shows_images(message: Mapping[str, Any]) -> bool:
    """Whether a message has images among its parts, in one of the ways that `parts_of` reads."""
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in ("image", "image_url") for part in content
    )


def is_stored(value: object) -> bool:
    """Whether the value of a column is an image, or a list of them, as `datasets.Image` stores them."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, Mapping) and isinstance(first.get("bytes"), bytes)


def column_images(value: Json, where: str) -> list[Any]:
    """Returns the images of a row's column: one, a list of them, or none."""
    images: list[Any] = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    if None in images:
        raise DataError(f"{where} has an image that is null; remove it")
    return images


def read_images(
    parts: Sequence[Part], column: Iterator[Any], folder: Path, limits: ImagesConfig, where: str
) -> tuple[tuple[Part, ...], tuple[Medium, ...]]:
    """Reads the images of a message, those without data from the row's `column`. Raises DataError if one is missing."""
    media: list[Medium] = []
    for part in filter(is_image, parts):
        place = f"{where}, image {len(media) + 1}"
        data = part.get("image")
        if data is None and (data := next(column, None)) is None:
            raise DataError(
                f"{place} has no data; expected: a file, a data URL or bytes as 'image', or the column data.image_key"
            )
        media.append(read_image(data, folder, limits, place))
    return tuple(IMAGE if is_image(part) else part for part in parts), tuple(media)


def read_image(
    data: object, folder: Path, limits: ImagesConfig, where: str, sizes: Mapping[int, tuple[int, int]] | None = None
) -> Medium:
    """Reads one image, and decodes it unless its id is one of `sizes`. Raises DataError if it is missing, broken, or not an
    image.
    """
    source = _source(data, folder, where)
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise DataError(f"{where}: cannot read the file {str(source)!r}: {error.strerror}") from error
    if sizes is not None and (number := id_of(content)) in sizes:
        return Medium(source, number, sizes[number])
    try:
        with decoded(content) as image:
            size = fitting((image.height, image.width), limits.max_pixels)
    except Exception as error:  # Pillow raises anything for broken files
        name = f"{len(content)} bytes" if isinstance(source, bytes) else f"the file {str(source)!r}"
        reason = "of no format that it knows" if "cannot identify" in str(error) else error
        raise DataError(f"{where}: {name}: not an image that Pillow can read ({reason}); replace or remove it") from error
    return Medium(source, id_of(content), size)


def id_of(content: bytes) -> int:
    """Returns the id of a medium: 63 bits of a digest of its file, which a token field holds with a sign."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return max(int.from_bytes(digest, "little") >> 1, 1)


def name_of(medium: int) -> str:
    """Returns the name of the file of a medium in a run's directory of media."""
    return f"{medium:016x}"


def _source(data: object, folder: Path, where: str) -> bytes | Path:
    """Returns the encoded bytes of an image, or the path of its file."""
    if isinstance(data, Mapping):  # of `datasets.Image`, undecoded
        data = data["bytes"] if data.get("bytes") is not None else data.get("path")
    if isinstance(data, bytes):
        return data
    if not isinstance(data, str):
        return _encoded(data, where)
    if data.startswith("data:"):
        header, _, text = data.partition(",")
        try:
            if not header.endswith(";base64"):
                raise ValueError(f"it begins with {header[:40]!r}")
            return base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error) as error:
            raise DataError(f"{where}: not a data URL in base64 ({error}); expected: data:image/png;base64,...") from error
    url = urlsplit(data)
    if url.scheme == "file":
        return Path(unquote(url.path))
    if url.scheme in ("http", "https"):
        raise DataError(f"{where} is {data!r:.80}; images are not fetched. Download it, and name the file")
    return folder / data


def _encoded(image: object, where: str) -> bytes:
    """Returns an image of Pillow as PNG, which loses nothing."""
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise DataError(f"{where} is {image!r:.80}; expected: a file, a data URL, bytes, or an image of Pillow")
    buffer = io.BytesIO()
    upright(image).save(buffer, "PNG")
    return buffer.getvalue()


def decoded(content: bytes) -> Pillow.Image:
    """Returns an image as transformers' `load_image` does: upright, in RGB. Raises whatever Pillow raises."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        return upright(image)


def upright(image: Pillow.Image) -> Pillow.Image:
    """Returns an image turned as its EXIF data say, in RGB."""
    from PIL import ImageOps

    turned: Pillow.Image = ImageOps.exif_transpose(image)
    return turned.convert("RGB")


def fitting(size: tuple[int, int], max_pixels: int | None) -> tuple[int, int]:
    """Returns the height and width within `max_pixels`, of about the same ratio."""
    height, width = size
    if max_pixels is None or height * width <= max_pixels:
        return size
    scale = math.sqrt(max_pixels / (height * width))
    short = max(1, math.floor(min(size) * scale))
    long = min(max(1, math.floor(max(size) * scale)), max_pixels // short)
    return (short, long) if height <= width else (long, short)


def with_fullest(batch: Batch, fullest: tuple[Tokens, Tokens] | None) -> Batch:
    """Returns a warm-up's batch, if it has the field, with a row of `MediaStore.fullest` from the second token on, where
    there is room for the whole of it, and without other media."""
    if MEDIA not in batch.fields:
        return batch
    tokens, media = batch["tokens"].copy(), np.zeros_like(batch[MEDIA])
    if fullest is not None:
        places = slice(1, 1 + len(fullest[0]))
        rows = batch["lengths"] >= places.stop
        tokens[rows, places], media[rows, places] = fullest
    return batch.with_fields(**{"tokens": tokens, MEDIA: media})


def ids_in(tokens: npt.NDArray[np.int64]) -> list[int]:
    """Returns the id of each medium of a row, in their order, from `RowMedia.tokens`."""
    ids: list[int] = (-tokens[tokens < 0]).tolist()
    return ids


@dataclass
class MediaCache(Generic[Value]):
    """What is made of an image by its id, as long as the latest values have no more than `most` bytes."""

    make: Callable[[int], Value]
    bytes_of: Callable[[Value], int]
    most: int = KEPT_BYTES
    _values: dict[int, Value] = field(default_factory=dict)  # the oldest first
    _bytes: int = 0

    def __call__(self, medium: int) -> Value:
        """Returns the value of an image."""
        if medium not in self._values:
            return self._keep(medium, self.make(medium))
        self._values[medium] = value = self._values.pop(medium)  # now the latest
        return value

    def prepare(self, media: Iterable[int]) -> None:
        """Makes the values of images that it lacks, several at once, as far as half of its bytes go.

        Alone at first, so that a processor has settled how its tokenizer pads before threads share it.
        """
        lacking = [medium for medium in dict.fromkeys(media) if medium not in self._values]
        made = 0
        with ThreadPoolExecutor(THREADS) as pool:
            while lacking and made < self.most // 2:
                now, lacking = lacking[: THREADS if made else 1], lacking[THREADS if made else 1 :]
                for medium, value in zip(now, pool.map(self.make, now), strict=True):
                    made += self.bytes_of(self._keep(medium, value))

    def _keep(self, medium: int, value: Value) -> Value:
        self._values[medium] = value
        self._bytes += self.bytes_of(value)
        while self._bytes > self.most:
            self._bytes -= self.bytes_of(self._values.pop(next(iter(self._values))))
        return value


class MediaStore:
    """The media of a run by their ids: files in a directory that all workers see. Files of the data are linked to."""

    def __init__(self, directory: Path, limits: ImagesConfig) -> None:
        self.directory, self.limits = directory, limits
        self.sizes: dict[int, tuple[int, int]] = {}

    def add(self, media: Iterable[Medium]) -> None:
        """Adds media that are not there yet."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if len(self.sizes) > KNOWN_SIZES:
            self.sizes.clear()
        for medium in media:
            path = self.path(medium.id)
            self.sizes[medium.id] = medium.size
            if isinstance(medium.data, bytes):
                if not path.exists():
                    part = path.with_name(f"{path.name}.{get_ident()}.part")
                    part.write_bytes(medium.data)
                    part.replace(path)
            elif path.resolve() != medium.data.resolve():
                path.unlink(missing_ok=True)
                path.symlink_to(medium.data.absolute())

    def keep_fullest(self, rows: Iterable[tuple[Tokens, RowMedia | None]]) -> None:
        """Keeps the row with most tokens of images, by which workers warm up. `rows` have tokens and media."""
        shown = [(tokens, media.tokens) for tokens, media in rows if media is not None]
        if not shown:
            return
        tokens, media = max(shown, key=lambda row: np.count_nonzero(row[1]))
        with replacing(self.directory / FULLEST) as part, part.open("wb") as file:
            np.savez(file, tokens=tokens, media=media)

    def fullest(self) -> tuple[Tokens, Tokens] | None:
        """Returns the tokens and media of the row that `keep_fullest` has kept."""
        path = self.directory / FULLEST
        if not path.exists():
            return None
        with np.load(path) as file:
            return file["tokens"], file["media"]

    def medium(self, number: int) -> Medium:
        """Returns the medium with an id. Raises DataError if there is none."""
        if number not in self.sizes:
            image = self.open(number)
            self.sizes[number] = image.height, image.width
        return Medium(self.path(number), number, self.sizes[number])

    def open(self, medium: int) -> Pillow.Image:
        """Returns an image as the model's processor is to see it. Raises DataError if its file has changed."""
        path = self.path(medium)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read the image {str(path.resolve())!r}: {error.strerror}; restore it") from error
        if id_of(content) != medium:
            raise DataError(f"the image {str(path)!r:.200} has changed since the run read it; restore it")
        image = decoded(content)
        height, width = fitting((image.height, image.width), self.limits.max_pixels)
        return image if (image.height, image.width) == (height, width) else image.resize((width, height))

    def path(self, medium: int) -> Path:
        """Returns the file of a medium."""
        return self.directory / name_of(medium)


def load_processor(directory: Path) -> ProcessorMixin:
    """Loads a model's processor. Without torchvision it has no part for videos. Raises ConfigError if there is none."""
    from transformers import AutoProcessor, ProcessorMixin
    from transformers.models.auto.processing_auto import processor_class_from_name

    try:
        found: Any = AutoProcessor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for malformed files, and ImportError without torchvision
        names = [_field(directory / file, "processor_class") for file in PROCESSOR_FILES]
        kind = next((processor_class_from_name(name) for name in names if name), None)
        if kind is None or find_spec("torchvision") is not None:
            raise ConfigError(f"transformers cannot load a processor for images from {directory}: {error}") from error
        found = without_videos(kind).from_pretrained(directory, local_files_only=True)
    if not isinstance(found, ProcessorMixin):
        raise ConfigError(
            f"the data have images, but {directory} has no processor for them, such as preprocessor_config.json; choose a "
            "model that takes images"
        )
    return found


@cache
def without_videos(kind: type[Any]) -> Any:
    """Returns a class of processors like `kind` without its part for videos, for which transformers needs torchvision.

    Who asks for that part gets the one for images, which has the same settings.
    """

    class Images(kind):  # type: ignore[misc]
        video_processor = property(lambda processor: processor.image_processor)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

    Images.__name__ = kind.__name__
    return Images


def _field(file: Path, name: str) -> str | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, str) else None


@dataclass(frozen=True)
class Expanded:
    """A text with the placeholder of each medium replaced. `spans` are where they were, and `places` where they are now."""

    text: str
    spans: Sequence[tuple[int, int]]
    places: Sequence[tuple[int, int]]

    def moved(self, place: int) -> int:
        """Returns where the character `place` of the text before is now. It is not inside of a placeholder."""
        number = bisect_right(self.spans, place, key=lambda span: span[1])
        return place + (self.places[number - 1][1] - self.spans[number - 1][1] if number else 0)


class MediaProcessor:
    """A model's processor, as far as texts and tokens go.

    What it writes in place of a placeholder follows from the sizes of a row's images, so none is processed here.
    """

    def __init__(self, processor: ProcessorMixin) -> None:
        """Raises ConfigError for a processor that does not tell what it writes for an image."""
        self.processor = processor
        self.tokenizer = cast("PreTrainedTokenizerFast", processor.tokenizer)
        self._written: dict[tuple[tuple[int, int], ...], list[str]] = {}
        try:
            self.placeholder, self.token_ids = str(processor.image_token), frozenset(processor.image_token_ids)
            self._replacements([(64, 64)])
        except (AttributeError, NotImplementedError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{type(processor).__name__} does not say what it writes for an image, by return_text_replacement_offsets "
                f"({type(error).__name__}: {error}); use a model whose processor does"
            ) from error

    def before(self, text: str, encoder: TextEncoder) -> list[int]:
        """Returns the special tokens that the processor puts in front of a conversation if the template has written none."""
        bos = self.tokenizer.bos_token
        return [] if bos is not None and text.startswith(bos) else encoder.before

    def expand(self, text: str, media: Sequence[Medium], source: str) -> Expanded:
        """Replaces the placeholders of a conversation's text. Raises DataError if they are not as many as its media."""
        around = text.split(self.placeholder)
        if len(around) != len(media) + 1:
            raise DataError(
                f"{source}: the text of the conversation has {len(around) - 1} placeholders {self.placeholder!r} for "
                f"{len(media)} images; a text must not contain it, and the chat template must write one for each image"
            )
        pieces, spans, places = [around[0]], list[tuple[int, int]](), list[tuple[int, int]]()
        start = length = len(around[0])
        try:
            replacements = self._replacements([medium.size for medium in media])
        except ValueError as error:  # Qwen's takes no strip that is 200 times as long as wide
            raise DataError(
                f"{source}: {type(self.processor).__name__} rejects an image: {error}; replace or remove it"
            ) from error
        for written, after in zip(replacements, around[1:], strict=True):
            spans.append((start, start + len(self.placeholder)))
            places.append((length, length + len(written)))
            start, length = spans[-1][1] + len(after), places[-1][1] + len(after)
            pieces += written, after
        return Expanded("".join(pieces), spans, places)

    def row(
        self, text: str, media: Sequence[Medium], encoder: TextEncoder, source: str
    ) -> tuple[str, list[int], RowMedia | None]:
        """Returns a conversation as the processor writes it: its text with placeholders replaced, its tokens, its media."""
        expanded, before = self.expand(text, media, source), self.before(text, encoder)
        (encoded,) = encoder.encode([expanded.text])
        row = self.tokens(encoded, expanded, media).padded(len(before), 0) if media else None
        return expanded.text, [*before, *encoded.ids], row

    def tokens(self, encoded: Encoded, expanded: Expanded, media: Sequence[Medium]) -> RowMedia:
        """Returns which tokens of the expanded text stand for its media."""
        ids = np.array(encoded.ids, np.int64)
        standing = np.isin(ids, [*self.token_ids])
        tokens = np.zeros_like(ids)
        for medium, (start, end) in zip(media, expanded.places, strict=True):
            first, last = encoded.index(start), encoded.index(end)
            own = first + np.flatnonzero(standing[first:last])
            tokens[own] = medium.id
            tokens[own[:1]] = -medium.id
        return RowMedia(tuple(media), tokens)

    def _replacements(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Returns what the processor writes for the images of a row, by their sizes."""
        key = tuple(sizes)
        if key not in self._written and key:
            from PIL import Image

            images = [Image.new("RGB", (width, height)) for height, width in key]
            texts = [self.placeholder * len(key)]
            output = self.processor(text=texts, images=[images], return_text_replacement_offsets=True, **ROUGHLY)
            self._written[key] = [intern(one["replacement"]) for one in output["text_replacement_offsets"][0]]
        return self._written.get(key, [])
