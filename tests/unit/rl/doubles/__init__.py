"""Doubles of packages that CI does not install, with the signatures of the real ones (tests/agents compares them)."""
