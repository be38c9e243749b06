"""Records of each token's experts: their field in batches, sequences of several requests, and checkpoints."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from dagrl.errors import ConfigError, RunError
from dagrl.rl.routed_experts import MISSING, RoutedLayers, field_bytes, field_of, join_records, routed_layers
from dagrl.runtime.edges.packet import encoded
from dagrl.runtime.shapes import Batch, Bucket, Field, check_batch, field_types
from dagrl.runtime.split import Split


def record(tokens: int, size: int = 6, seed: int = 0) -> np.ndarray:
    """Returns bytes with zeros at the ends of tokens, which numpy's strings would hide."""
    expected = np.random.default_rng(seed).integers(0, 3, (tokens, size)).astype(np.uint8)
    expected[:, -2:] = 0
    return expected


def test_the_field_keeps_every_byte_through_padding_and_splitting() -> None:
    records = [record(3, seed=1), record(5, seed=2), record(1, seed=3)]
    batch = Batch({"lengths": np.array([4, 5, 2]), "experts": field_of(records, 5)})
    check_batch("train_step", batch, field_types({"experts": Field(RoutedLayers(3, 4, 2).field_dtype)}))
    split = Split((np.array([0, 2]), np.array([1])), Bucket(2, 8), 5)
    sent = [pickle.loads(pickle.dumps(split.share(batch, shard))) for shard in range(2)]  # noqa: S301
    for (shard, row), expected in zip(((0, 0), (1, 0), (0, 1)), records, strict=True):
        actual = field_bytes(sent[shard]["experts"])[row]
        np.testing.assert_array_equal(actual[: len(expected)], expected)
        assert (actual[len(expected) : 5] == MISSING).all()
    assert encoded(batch) is not None


def test_a_sequence_without_a_record_is_an_error() -> None:
    with pytest.raises(RunError, match="1 of 2 sequences have no record"):
        field_of([record(2), None], 4)


def test_the_first_record_of_a_token_counts() -> None:
    first, second = record(4, seed=1), record(6, seed=2)
    first[1] = MISSING  # was in a prefix cache
    joined = join_records(first, second)
    np.testing.assert_array_equal(joined, [first[0], second[1], first[2], first[3], second[4], second[5]])
    np.testing.assert_array_equal(join_records(first, second[:2]), [first[0], second[1], first[2], first[3]])
    assert join_records(None, second) is second and join_records(first, None) is first


def test_two_bytes_are_used_where_an_id_needs_them() -> None:
    assert RoutedLayers(61, 256, 8).token_bytes == 2 * 61 * 8
    assert RoutedLayers(48, 128, 8).token_bytes == 48 * 8


@pytest.mark.parametrize(
    ("keys", "experts"), [({"num_experts": 128}, 128), ({"num_local_experts": 8}, 8), ({"n_routed_experts": 256}, 256)]
)
def test_sizes_are_read_from_the_model(keys: dict[str, int], experts: int) -> None:
    sizes = routed_layers({"num_hidden_layers": 4, "num_experts_per_tok": 2, **keys})
    assert sizes == RoutedLayers(4, experts, 2)


def test_a_dense_model_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'qwen3' has no experts to replay"):
        routed_layers({"model_type": "qwen3", "num_hidden_layers": 4})
