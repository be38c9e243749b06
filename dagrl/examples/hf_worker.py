"""A train worker of your own: any causal language model of Hugging Face, a whole copy on each rank, on the CPU.

dagrl train examples/grpo_quickstart.yaml policy.worker=hf_worker:HfWorker    # found on PYTHONPATH, or in this directory
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from dagrl import Batch
from dagrl.workers.train.module_worker import ModuleWorker


class HfWorker(ModuleWorker):
    requires = ("transformers",)

    def setup(self, address: str) -> None:
        """Meets the other ranks at `address` and loads the model."""
        size, rank = self.context.layout.world_size, self.context.rank
        dist.init_process_group("gloo", f"tcp://{address}", world_size=size, rank=rank)
        self.model = AutoModelForCausalLM.from_pretrained(self.policy.model_name, dtype=torch.float32)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forgets moments and schedule: at the start, and between SFT and GRPO."""
        decay = self.policy.optimizer.weight_decay  # of matrices alone
        groups = [{"params": one, "weight_decay": decay * (one.ndim > 1)} for one in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(groups)
        self.steps.taken = 0

    def logprobs_of(self, model: torch.nn.Module, batch: Batch, temperature: float) -> Tensor:
        """Returns the log-probability of each token [rows, tokens]; entry 0 is 0."""
        tokens = torch.tensor(batch["tokens"])  # padding comes last, where the causal mask hides it
        every = (model(tokens).logits[:, :-1] / temperature).log_softmax(-1)
        return torch.nn.functional.pad(every.gather(2, tokens[:, 1:, None])[..., 0], (1, 0))
