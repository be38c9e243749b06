"""Advantages compared with hand-written arithmetic and with the definition of a leave-one-out mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.errors import DataError
from dagrl.rl.advantages import group_advantages, zero_variance_groups


def test_group_mean_baseline() -> None:
    found = group_advantages([[0, 0, 0, 1], [2, 4, 6, 8]], leave_one_out=False, normalize=False)
    np.testing.assert_allclose(found, [[-0.25, -0.25, -0.25, 0.75], [-3, -1, 1, 3]], rtol=0, atol=1e-15)


def test_leave_one_out_baseline() -> None:
    found = group_advantages([[0, 0, 0, 1], [2, 4, 6, 8]], leave_one_out=True, normalize=False)
    others = [[2 - 18 / 3, 4 - 16 / 3, 6 - 14 / 3, 8 - 12 / 3]]
    np.testing.assert_allclose(found, [[-1 / 3, -1 / 3, -1 / 3, 1], *others], rtol=0, atol=1e-15)


def test_normalized_by_the_sample_standard_deviation() -> None:
    found = group_advantages([[2, 4, 6, 8]], leave_one_out=False, normalize=True)
    deviation = np.sqrt((9 + 1 + 1 + 9) / 3)
    np.testing.assert_allclose(found, np.array([[-3, -1, 1, 3]]) / deviation, rtol=1e-6)


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_group_without_variance_has_zero_advantages(leave_one_out: bool, normalize: bool) -> None:
    rewards = [[0.1] * 7, [0, 0, 0, 0, 0, 0, 1]]  # the mean of seven 0.1 is not 0.1 in floating point
    found = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)
    assert (found[0] == 0.0).all()
    assert found[1, -1] > 0 > found[1, 0]
    assert zero_variance_groups(rewards).tolist() == [True, False]


@given(st.integers(1, 4), st.integers(2, 6), st.data())
def test_leave_one_out_is_the_mean_of_the_others(prompts: int, generations: int, data: st.DataObject) -> None:
    row = st.lists(st.floats(-10, 10), min_size=generations, max_size=generations)
    rewards = np.array(data.draw(st.lists(row, min_size=prompts, max_size=prompts)))
    found = group_advantages(rewards, leave_one_out=True, normalize=False)
    for (prompt, generation), reward in np.ndenumerate(rewards):
        others = np.delete(rewards[prompt], generation)
        assert found[prompt, generation] == pytest.approx(reward - others.mean(), abs=1e-9)


@given(st.integers(2, 6), st.booleans(), st.booleans(), st.data())
def test_invalid_generations_are_ignored(
    generations: int, leave_one_out: bool, normalize: bool, data: st.DataObject
) -> None:
    rewards = np.array([data.draw(st.lists(st.floats(-10, 10), min_size=generations, max_size=generations))])
    valid = np.array([data.draw(st.lists(st.booleans(), min_size=generations, max_size=generations))])
    found = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize, valid=valid)
    assert (found[~valid] == 0.0).all()
    if valid.sum() < 2:
        assert (found == 0.0).all() and zero_variance_groups(rewards, valid).all()
        return
    alone = group_advantages([rewards[valid]], leave_one_out=leave_one_out, normalize=normalize)
    np.testing.assert_allclose(found[valid], alone[0], rtol=1e-9, atol=1e-12)
    assert zero_variance_groups(rewards, valid).tolist() == zero_variance_groups([rewards[valid]]).tolist()


def test_rewards_are_not_changed() -> None:
    rewards = np.array([[0.0, 1.0]])
    group_advantages(rewards, leave_one_out=True, normalize=True)
    assert rewards.tolist() == [[0.0, 1.0]]


def test_a_group_of_one_is_an_error() -> None:
    with pytest.raises(DataError, match="num_generations_per_prompt"):
        group_advantages([[1.0], [0.0]], leave_one_out=True, normalize=False)


def test_a_reward_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(DataError, match="prompt 1, generation 0 is nan"):
        group_advantages([[1.0, 0.0], [float("nan"), 0.0]], leave_one_out=False, normalize=False)
