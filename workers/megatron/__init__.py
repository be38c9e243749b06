"""Megatron-Core train workers. Importing this is cheap; Megatron itself is imported when a worker is set up."""

from dagrl.workers.megatron.architecture import check_layout
from dagrl.workers.megatron.worker import MegatronWorker

__all__ = ["MegatronWorker", "check_layout"]
