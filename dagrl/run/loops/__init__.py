"""The training loops: demonstrations, preferences, GRPO and asynchronous GRPO. Each reads from top to bottom."""
