"""Measurements: orchestration overhead, refit, steps and training, and their baselines."""
