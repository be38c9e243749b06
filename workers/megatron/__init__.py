"""Megatron-Core train workers. Importing this costs nothing; Megatron is imported when a worker is set up."""

from workers.megatron.architecture import check_layout
from workers.megatron.worker import MegatronWorker

__all__ = ["MegatronWorker", "check_layout"]
