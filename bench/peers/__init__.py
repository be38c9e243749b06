"""dagrl compared with what people would install instead: TRL and vLLM's own engines, on the same GPU in the same run.

    dagrl bench peers --cases "grpo 0.6b 128" "sft 0.6b 16" "generate 0.6b 256" [--peers trl vllm vllm-async] [--json F]

A case is a kind, a model and the number of sequences of a step. `grpo`: a whole step, with 120 prompt tokens, groups of 8
and completions of `--completion` tokens. `sft`: an optimizer step over sequences of `--length` tokens. `generate`: the
generation of a GRPO step. Both sides start from the same checkpoint with random weights, in bfloat16 with float32 master
weights, and take one optimizer step per batch. Each side runs in a process of its own. They take turns of `--steps` steps,
`--pairs` times; `--apart` starts each side for its turn alone, for models of which two do not fit on the GPU.

A row's ratio is the peer's time over dagrl's: the median over pairs, with the lowest and the highest pair. `tokens` are the
completion tokens of a step (`sft`: all tokens). Peers whose package is not installed are left out and reported.
`--tiny` also runs without a GPU, to try the benchmark.
"""

from __future__ import annotations

from dagrl.bench.peers.command import add_arguments, run

__all__ = ["add_arguments", "run"]
