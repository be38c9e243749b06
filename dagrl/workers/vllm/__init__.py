"""The generation worker: vLLM, one engine rank a process.

Where to find what:

    phases     `worker.py`; `engine.py` runs quanta of requests, `bursts.py` and `burst_graphs.py` several steps at once
    kernels    `decode_attention.py`, `sampling_kernels.py`
    start      `environment.py`, then `launch.py` makes an engine rank; `features.py` has what differs between releases
    weights    `loader.py` records where vLLM's loader puts a checkpoint, `destinations.py` makes what a refit writes of it,
               `lora.py` the same for adapters, `described.py` the same without an engine; `quantization.py` for FP8
    others     `expert_recorder.py` records routing; `media.py` makes inputs of images
"""

from dagrl.workers.vllm.worker import VllmWorker as VllmWorker
