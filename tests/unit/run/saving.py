"""Saves a checkpoint as `Checkpoints` does, and fills the disk."""

import resource
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


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Makes writes of more than `size` bytes to a file of this process raise OSError in the block."""
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
