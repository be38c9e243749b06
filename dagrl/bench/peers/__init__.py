"""dagrl compared with what people would install instead: TRL and vLLM's own engines, on the same GPU in the same run.

    dagrl bench peers --cases "grpo 0.6b 128" "sft 0.6b 16" "generate 0.6b 256" [--peers trl torchtitan vllm] [--json F]

A case is a kind, a model and the number of sequences of a step. `grpo`: a whole step, with 120 prompt tokens, groups of 8
and completions of `--completion` tokens. `sft`: an optimizer step over sequences of `--length` tokens. `generate`: the
generation of a GRPO step; dagrl's side is one engine in quanta, without Ray. Both sides start from the same checkpoint with
random weights, in bfloat16 with float32 master weights, and take one optimizer step per batch. Each side runs in a process
of its own. All start at the same time and take turns of `--steps` steps, up to `--pairs` times, after a turn of one step
that is not counted. Between turns they give the memory that no tensor uses back, so the first step of a turn may be slower
than the others. `--apart` starts each side for its turn alone, for models of which two do not fit on the GPU. Cases of
`grpo` or `generate` in a row, of one model, share processes, which are built for the largest. Engines of dagrl and vLLM run
at most 512 sequences at once.

With `--deadline S`, every comparison gets a share of the time that is left, and at least one round of turns if it ends in
time. The rows so far are written after every round; at the deadline sides that still work are killed. `--more F` adds pairs
to the rows of another run, if hardware and packages are equal.

`dagrl-fp8` is dagrl with weights in FP8, `dagrl-kv` with a KV cache in FP8, and `dagrl-fp8-kv` with both, to compare with
bfloat16. The notes of a row have the seconds that each side took to start, next to the others, and for `grpo` of dagrl
KL(generation || training), `gen_kl_error`.

A row's ratio is the peer's time over dagrl's: the medians of a turn's steps, the median over rounds, and the lowest and the
highest round. `tokens` are the completion tokens of a step (`sft`: all tokens). Peers whose package is not installed are
left out and reported.
`--tiny` also runs without a GPU, to try the benchmark.
"""

from __future__ import annotations

from dagrl.bench.peers.command import add_arguments, run

__all__ = ["add_arguments", "run"]
