"""`dagrl view`: serves the page of one run or two until it is interrupted, or writes it to a file."""

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from dagrl.errors import ConfigError
from dagrl.files import write_whole
from dagrl.telemetry.view.data import RunView
from dagrl.telemetry.view.server import exported_page, serving

logger = logging.getLogger(__name__)

MOST_RUNS = 2


def serve(directories: Sequence[Path], host: str, port: int) -> None:
    """Serves until Ctrl-C. Raises ConfigError for what is not a run, or if the port is taken."""
    runs = _open(directories)
    with ExitStack() as stack:
        try:
            address = stack.enter_context(serving(runs, host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot serve at {host}, port {port} ({error}); choose another with --port or --host"
            ) from error
        logger.info("serving %s at %s (Ctrl-C ends it)", " and ".join(map(str, directories)), address)
        threading.Event().wait()


def export(directories: Sequence[Path], file: Path, most_samples: int) -> None:
    """Writes the page with its data. Raises ConfigError for what is not a run."""
    runs = _open(directories)
    write_whole(file, exported_page(runs, most_samples))
    logger.info("wrote %s (%.1f MB)", file, file.stat().st_size / 1e6)


def _open(directories: Sequence[Path]) -> list[RunView]:
    if len(directories) > MOST_RUNS:
        raise ConfigError(f"dagrl view shows at most {MOST_RUNS} runs; found {len(directories)}")
    return [RunView(directory) for directory in directories]
