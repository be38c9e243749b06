"""Environments of other libraries as environments of a run: verifiers and OpenEnv. docs/rewards.md shows how to use them."""
