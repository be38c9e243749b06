"""Takes turns inside TRL's trainers, which own their loop: a callback times each step, and waits between turns."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from dagrl.bench.peers.turns import Told


class Turns(TrainerCallback):  # type: ignore[misc]
    """Waits for a turn where a step would begin, and answers once its last step has ended."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._steps = 0
        self._seconds: list[float] = []
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """The trainer is built: takes the first turn's number of steps."""
        self._told.answer()
        self._next(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Takes the time, which includes what the trainer did to draw and prepare the batch."""
        _synchronize()
        self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) > self._steps:
            self._told.answer(self._seconds[1:])
            self._next(control)
        self._began = time.perf_counter()

    def _next(self, control: Any) -> None:
        _release()
        turn = self._told.turn()
        if turn is None:
            control.should_training_stop = True
        self._seconds, self._steps = [], 0 if turn is None else turn[1]
        self._began = time.perf_counter()


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _release() -> None:
    """Gives the memory that no tensor uses to the other side."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
