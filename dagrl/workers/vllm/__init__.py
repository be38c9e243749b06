"""The generation worker: vLLM, one engine rank a process.

Where to find what:

    phases     `worker.py`; `engine.py` runs quanta of requests, `bursts.py` several steps at once
    start      `environment.py`, then `launch.py` makes an engine rank; `features.py` has what differs between releases
    weights    `loader.py` records where vLLM's loader puts a checkpoint, `destinations.py` makes what a refit writes of it,
               `lora.py` the same for adapters, `described.py` the same without an engine; `quantization.py` for FP8
    others     `expert_recorder.py` records routing; `plugin.py` and `transfer.py` are a backend of vLLM's weight transfers
"""

from dagrl.workers.vllm.worker import VllmWorker as VllmWorker
