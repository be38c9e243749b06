"""Weight layouts of model families: which rank holds which box of which Hugging Face parameter, in which local tensor.

Rules for Megatron: `decoder` (dense, and with experts), `mla`, `mamba`. All rules are pure functions of the
model's `config.json` and a rank's coordinates; nothing imports torch. `docs/refit.md` explains how to add a family.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.config import Json
from dagrl.errors import ConfigError
from dagrl.workers.families.decoder import DENSE, MOE
from dagrl.workers.families.mamba import MAMBA
from dagrl.workers.families.megatron import Family
from dagrl.workers.families.mla import MLA

FAMILIES: tuple[Family, ...] = (DENSE, MOE, MLA, MAMBA)


def known_family(hf_config: Mapping[str, Json]) -> Family | None:
    """Returns the family of a `config.json` by its `model_type`; None if it has no rules."""
    kind = hf_config.get("model_type")
    return next((family for family in FAMILIES if kind in family.model_types), None)


def find_family(hf_config: Mapping[str, Json]) -> Family:
    """Returns the family of a `config.json`. Raises ConfigError if there is none."""
    if (family := known_family(hf_config)) is not None:
        return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ConfigError(
        f"model_type is {hf_config.get('model_type')!r}, which has no weight layout rules; the known types are {known}. "
        "Add a family under workers/families (docs/refit.md)"
    )
