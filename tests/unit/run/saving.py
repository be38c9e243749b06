"""Saves a checkpoint as `Checkpoints` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagrl.run.checkpoint_store import CheckpointStore, TrainState


@contextmanager
def saving(store: CheckpointStore, state: TrainState) -> Iterator[Path]:
    """Yields a directory for a checkpoint. Publishes it when the block ends; removes it if the block raises."""
    directory = store.begin(state)
    with store.discarding(directory):
        yield directory
    store.publish(state, directory)
