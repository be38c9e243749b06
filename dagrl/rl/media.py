"""Images that environments and agents send while a run goes on: read, kept in the run's store, and named in messages.

In the messages of rollouts an image is `{"type": "image", "medium": NAME}`, where NAME is its file in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from dagrl.config import Config, ImagesConfig
from dagrl.data.media import (
    IMAGE,
    MediaProcessor,
    MediaStore,
    Medium,
    Part,
    ids_in,
    is_image,
    parts_of,
    read_image,
    read_images,
    shows_images,
)
from dagrl.data.replies import Images
from dagrl.errors import DataError
from dagrl.telemetry.record import RunPaths

if TYPE_CHECKING:
    from dagrl.data.encoder import TextEncoder
    from dagrl.data.tokenization import Prompt

MEDIUM = "medium"  # key of an image's part: its name in the store

Message = Mapping[str, Any]


def read_messages(messages: Sequence[Message], limits: ImagesConfig, where: str) -> list[dict[str, Any]]:
    """Reads the images of messages, each of which is then a `Medium` in its part. Raises DataError.

    Paths are relative to the working directory.
    """
    read = []
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if shows_images(message):
            place = f"{where}, message {number}"
            parts, media = read_images(parts_of(message["content"], place), iter(()), Path(), limits, place)
            found = iter(media)
            content = [{**IMAGE, "image": next(found)} if is_image(part) else dict(part) for part in parts]
        read.append({**message, "content": content} if "content" in message else dict(message))
    return read


@dataclass(frozen=True)
class RolloutMedia:
    """The images of a run's conversations."""

    processor: MediaProcessor
    store: MediaStore

    @classmethod
    def of(cls, config: Config, processor: MediaProcessor) -> RolloutMedia:
        """Returns those of a run."""
        return cls(processor, MediaStore(RunPaths.of(config).media.absolute(), config.data.images))

    def keep(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Puts the media of `read_messages` into the store. Returns the messages with their names."""

        def kept(part: Part, _: str) -> Part:
            self.store.add([part["image"]])
            return {**IMAGE, MEDIUM: part["image"].name}

        return _with_images(messages, kept)

    def requested(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Returns the messages of a client with their images in the store, by name.

        Raises DataError for an image that is neither a data URL nor one of the example's.
        """
        return _with_images(messages, lambda part, where: {**IMAGE, MEDIUM: self._medium(part.get("image"), where).name})

    def _medium(self, data: object, where: str) -> Medium:
        url = urlsplit(data) if isinstance(data, str) else None
        if url is not None and url.scheme == "file":
            path = Path(unquote(url.path))
            if path.parent == self.store.directory and path.is_file():  # one of the example's
                return self.store.medium(int(path.name, 16))
        if url is None or url.scheme != "data":
            raise DataError(
                f"{where}: an image is {data!r:.200}; expected: a data URL, data:image/png;base64,..., or the URL of one of "
                "the example's images. No other file is read, and nothing is fetched"
            )
        medium = read_image(data, Path(), self.store.limits, where, self.store.sizes)
        self.store.add([medium])
        return medium

    def media_of(self, messages: Sequence[Message]) -> list[Medium]:
        """Returns the media of messages."""
        parts = [part for message in messages if shows_images(message) for part in message["content"]]
        return [self.store.medium(int(part[MEDIUM], 16)) for part in parts if is_image(part)]

    def images(self, messages: Sequence[Message]) -> Images:
        """Returns the processor and the `media_of` messages."""
        return self.processor, self.media_of(messages)

    def ids(self, text: str, media: Sequence[int], encoder: TextEncoder) -> list[int]:
        """Returns the tokens of a conversation with these images."""
        return self.processor.row(text, [self.store.medium(number) for number in media], encoder, "the conversation")[1]

    def shown(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Returns the messages of a prompt with the URLs of its images, which are files of the store."""
        ids = iter(ids_in(prompt.media.tokens) if prompt.media is not None else ())

        def shown(*_: object) -> Part:
            return {"type": "image_url", "image_url": {"url": self.store.path(next(ids)).as_uri()}}

        return _with_images(prompt.messages, shown)


def _with_images(messages: Sequence[Message], change: Callable[[Part, str], Part]) -> list[dict[str, Any]]:
    """Returns messages with other images: `change` gets the part of each, and the place of its message."""
    changed = []
    for number, message in enumerate(messages):
        if shows_images(message):
            place = f"messages.{number}"
            parts = [change(part, place) if is_image(part) else part for part in parts_of(message["content"], place)]
            message = {**message, "content": [*map(dict, parts)]}
        changed.append(dict(message))
    return changed
