"""What processes that meet tell each other through a store that anyone on the network may write to.

Messages are pickles of plain data, of the dataclasses of a plan, and of our errors. Reading one runs no other code.
"""

from __future__ import annotations

import importlib
import io
import pickle
from dataclasses import is_dataclass
from typing import Any

from dagrl.errors import ChannelError, DagrlError, RunError, error_text

_MODULES = ("dagrl.refit.slices", "dagrl.refit.transfers", "dagrl.channels.spec", "dagrl.errors")


def write_told(value: object) -> bytes:
    """Returns the message. An error that is not ours becomes a RunError with its text."""
    if isinstance(value, Exception) and type(value).__module__ != DagrlError.__module__:
        value = RunError(error_text(value))
    return pickle.dumps(value)


def read_told(message: bytes, sender: str) -> Any:
    """Returns what `write_told` was given. Raises ChannelError for any other message; `sender` is named in it."""
    try:
        return _PlanUnpickler(io.BytesIO(message)).load()
    except Exception as error:  # whatever its bytes make of it
        raise ChannelError(
            f"the message of {sender} is not one of dagrl ({error_text(error)}); look for another process that writes to "
            "this address, and for another version of dagrl"
        ) from error


class _PlanUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        found = getattr(importlib.import_module(module), name, None) if module in _MODULES else None
        if isinstance(found, type) and (is_dataclass(found) or issubclass(found, DagrlError)):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")
