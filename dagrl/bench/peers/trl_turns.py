"""Takes turns inside TRL's trainers, which own their loop: a callback times each step, and waits between turns."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from dagrl.bench.peers.case import PeerCase
from dagrl.bench.turns import Told


def trainer_arguments(output: str, micro: int, sequences: int) -> dict[str, Any]:
    """Returns the arguments that both of TRL's configurations get: microbatches, float32 weights, and no files or logs."""
    import torch

    return {
        "output_dir": output,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": sequences // micro,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "max_steps": 1_000_000,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "model_init_kwargs": {"dtype": "float32"},
        "disable_tqdm": True,
        "seed": 0,
    }


class Turns(TrainerCallback):  # type: ignore[misc]
    """Waits for a turn where a step would begin, and answers once its last step has ended.

    A turn of another case ends the training and stays in `turn`. Set `case` to its case before the next trainer begins.
    """

    def __init__(self, told: Told, case: PeerCase) -> None:
        self.case = case
        self.turn: tuple[PeerCase, int] | None = None
        self._told = told
        self._seconds: list[float] = []
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """The trainer is built: takes the first turn's number of steps, if it has not been told."""
        if self.turn is None:
            self._told.answer()
            self._next(control)
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Takes the time, which includes what the trainer did to draw and prepare the batch."""
        assert self.turn is not None
        _synchronize()
        self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) == self.turn[1]:
            self._told.answer(self._seconds)
            self._next(control)
        self._began = time.perf_counter()

    def _next(self, control: Any) -> None:
        release()
        self._seconds, self.turn = [], self._told.turn()
        control.should_training_stop = self.turn is None or self.turn[0] != self.case


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Gives the memory that no tensor uses to the other side."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
