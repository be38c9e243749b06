"""Which family a model is of."""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.config import Json
from dagrl.errors import ConfigError
from workers.families.dense import FAMILY as DENSE
from workers.families.mamba import FAMILY as MAMBA
from workers.families.mla import FAMILY as MLA
from workers.families.model import Family
from workers.families.moe import FAMILY as MOE

FAMILIES: tuple[Family, ...] = (DENSE, MOE, MLA, MAMBA)


def find_family(hf_config: Mapping[str, Json]) -> Family:
    """The family of a `config.json` by its `model_type`. Raises ConfigError for one without rules."""
    kind = hf_config.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ConfigError(
        f"model_type is {kind!r}, for which there are no weight layout rules; there are some for {known}. "
        "Add a family under workers/families (docs/refit.md)"
    )
