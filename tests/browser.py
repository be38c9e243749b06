"""A headless Chromium, driven over its DevTools pipe: `apt install chromium` on Debian.

with browser(tmp_path) as tab:
    tab.open("http://127.0.0.1:8365/")
    tab.wait_for("document.body.dataset.ready === 'curves'")
    tab.click("#tabs button:nth-child(2)")
    tab.evaluate("document.title")
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 60.0

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


class Tab:
    """One page. `errors` are the exceptions of its scripts."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer, self._last, self._rest = reader, writer, 0, b""
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")
        self.send("Runtime.enable")

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Returns once the JavaScript condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {condition}; errors: {self.errors}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Presses and releases the mouse in the middle of the first element."""
        spot = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **spot)

    def hover(self, selector: str) -> None:
        """Moves the mouse to the middle of the first element."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def choose(self, selector: str, value: str) -> None:
        """Chooses an option of a select, or types into an input."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"({found}.value = {json.dumps(value)}, {found}.dispatchEvent(new Event('change')))")

    def texts(self, selector: str) -> list[str]:
        """Returns the text of every element that matches."""
        texts: list[str] = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
        )
        return texts

    def _middle(self, selector: str) -> dict[str, float]:
        script = (
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.scrollIntoView({{block: 'center'}});"
            "const box = one.getBoundingClientRect(); return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
        )
        spot: dict[str, float] = self.evaluate(script)
        return spot

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a DevTools method and returns its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last:
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"chromium did not answer within {PATIENCE_S} s"
            self._rest += os.read(self._reader, 1 << 20)
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Starts a browser with an empty profile."""
    assert CHROMIUM is not None
    to_read, to_write = os.pipe(), os.pipe()  # chromium reads from 3 and writes to 4
    command = (
        f'exec 3<&{to_read[0]} 4>&{to_write[1]}; exec "$0" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage '
        f'--hide-scrollbars --no-first-run --window-size=1500,1000 --remote-debugging-pipe --user-data-dir="$1"'
    )
    process = subprocess.Popen(
        ["bash", "-c", command, CHROMIUM, str(profile)],
        pass_fds=(to_read[0], to_write[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read[0])
    os.close(to_write[1])
    try:
        yield Tab(to_write[0], to_read[1])
    finally:
        os.close(to_read[1])
        process.terminate()
        process.wait(PATIENCE_S)
        os.close(to_write[0])
