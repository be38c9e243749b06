"""An environment that shows an image after each action."""

import io
from typing import Any

from PIL import Image

SIZES = ((40, 24), (16, 32))


def screen(number: int) -> Image.Image:
    return Image.new("RGB", SIZES[number % 2], (40 * number % 256, 80, 160))


class Screens:
    """Shows a screen after each action: an image of Pillow, then files."""

    def __init__(self) -> None:
        self._actions = 0

    def reset(self, example: dict[str, Any]) -> None:
        """Leaves the prompt as it is."""

    def step(self, completion: str) -> list[dict[str, Any]]:
        image: Any = screen(self._actions)
        if self._actions:
            file = io.BytesIO()
            image.save(file, "PNG")
            image = file.getvalue()
        self._actions += 1
        return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "and"}]}]
