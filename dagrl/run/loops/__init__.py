"""The training loops: SFT, GRPO and asynchronous GRPO. Each reads from top to bottom."""
