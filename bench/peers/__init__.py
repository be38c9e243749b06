"""dagrl compared with what people would install instead: TRL and vLLM's own engines, on the same GPU in the same run.

    dagrl bench peers --cases "grpo 0.6b 128" "sft 0.6b 16" "generate 0.6b 256" [--peers trl vllm vllm-async] [--json F]

A case is a kind, a model and the number of sequences of a step. `grpo`: a whole step, with 120 prompt tokens, groups of 8
and completions of `--completion` tokens. `sft`: an optimizer step over sequences of `--length` tokens. `generate`: the
generation of a GRPO step; dagrl's side is one engine in quanta, without Ray. Both sides start from the same checkpoint with
random weights, in bfloat16 with float32 master weights, and take one optimizer step per batch. Each side runs in a process
of its own. Both start at the same time and take turns of `--steps` steps, up to `--pairs` times, after turns that are not
counted. Between turns they give the memory that no tensor uses back. `--apart` starts each side for its turn alone, for
models of which two do not fit on the GPU. Cases of `generate` in a row share engines.

With `--deadline S`, every comparison gets a share of the time that is left, and at least one pair of turns. The rows so far
are written after every pair.

A row's ratio is the peer's time over dagrl's: the median over pairs, with the lowest and the highest pair. `tokens` are the
completion tokens of a step (`sft`: all tokens). Peers whose package is not installed are left out and reported.
`--tiny` also runs without a GPU, to try the benchmark.
"""

from __future__ import annotations

from dagrl.bench.peers.command import add_arguments, run

__all__ = ["add_arguments", "run"]
