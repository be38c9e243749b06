"""Megatron-Core workers. Importing this is cheap; Megatron itself is imported when a worker is set up."""

from dagrl.workers.megatron.architecture import check_layout
from dagrl.workers.megatron.value_worker import MegatronValueWorker
from dagrl.workers.megatron.worker import MegatronTeacherWorker, MegatronWorker

__all__ = ["MegatronTeacherWorker", "MegatronValueWorker", "MegatronWorker", "check_layout"]
