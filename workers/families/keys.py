"""What of a `config.json` says which model it is: train and generation workers must have the same."""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.config import Json

OF_THE_FILE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Who wrote a checkpoint, with what, and in which form: both sides may differ in it and still compute the same model."""


def model_keys(hf_config: Mapping[str, Json]) -> dict[str, Json]:
    """All keys that decide what is computed, not only where weights lie: a rotary base differs without a trace in shapes.

    A key that is null is one that is not there.
    """
    return {key: value for key, value in hf_config.items() if value is not None and key not in OF_THE_FILE}
