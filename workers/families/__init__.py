"""Weight layouts of model families: which rank holds which box of which Hugging Face parameter, and where.

A family is one module of rules, for Megatron's side and for vLLM's: `dense`, `moe`, `mla`, `mamba`. Everything here is a
pure function of the model's `config.json` and a rank's place; nothing imports torch. `docs/refit.md` says how to add one.
"""

from workers.families.registry import FAMILIES, find_family

__all__ = ["FAMILIES", "find_family"]
