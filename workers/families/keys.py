"""Which keys of a `config.json` decide where weights lie: those that the rules read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dagrl.config import Json
from dagrl.layout import ParallelLayout


class _Recorder(Mapping[str, Json]):
    """A mapping that remembers what was asked of it."""

    def __init__(self, content: Mapping[str, Json]) -> None:
        self._content = content
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Json:
        self.asked.add(key)
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


def deciding_keys(hf_config: Mapping[str, Json]) -> dict[str, Json]:
    """The keys that Megatron's or vLLM's rules read of this model, with their values; missing ones are None."""
    from workers.families.vllm import VllmRank
    from workers.megatron.weights import megatron_weight_slices
    from workers.vllm.weights import vllm_weight_slices

    recorder = _Recorder(hf_config)
    megatron_weight_slices(recorder, ParallelLayout(), 0)
    vllm_weight_slices(recorder, VllmRank())
    return {key: hf_config.get(key) for key in sorted(recorder.asked)}
