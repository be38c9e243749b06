"""What every train worker does, whatever computes its model.

worker     `worker.py` has the phases and what the training loops call; `backend.py` is what a backend supplies
batches    `row_plans.py` plans rows, `microbatches.py` makes tensors of them, `losses.py` computes the loss of each,
           `logprobs.py` the log-probabilities of an output layer, `routing.py` what routers of experts do with records
steps      `optimizer.py` has the schedule and the order of a step, `throughput.py` its metrics
own        `module_worker.py` is the base of a worker of your own, with a whole module on each rank
state      `kept_logprobs.py`, `reference.py` and `offload.py`
files      `checkpoint.py` and `train_state.py`; `hf_load.py` and `hf_export.py`, for weights that `WeightSlice`s describe
"""
