"""The generation worker we ship: vLLM, one engine rank a process."""

from dagrl.workers.vllm.worker import VllmWorker

__all__ = ["VllmWorker"]
