"""Kernels: batched strided copies, blockwise FP8 quantization and checksums, with a torch path for CPUs."""
