"""The workers that dagrl ships: `megatron` and `fsdp` train, `vllm` generates."""
