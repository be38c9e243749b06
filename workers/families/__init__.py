"""Weight layouts of model families: which rank holds which box of which Hugging Face parameter, in which local tensor.

Each family is one module with rules for Megatron: `dense`, `moe`, `mla`, `mamba`. All rules are pure functions of the
model's `config.json` and a rank's coordinates; nothing imports torch. `docs/refit.md` explains how to add a family.
"""

from dagrl.workers.families.registry import FAMILIES, find_family

__all__ = ["FAMILIES", "find_family"]
