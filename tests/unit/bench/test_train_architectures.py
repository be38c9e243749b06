"""The table of architectures: its tolerance, and the reasons of rows that fail."""

import re
from math import nan

import pytest
import yaml

from dagrl.bench.forked import reason_of
from dagrl.bench.train_architectures import compare
from dagrl.errors import ConfigError


@pytest.mark.parametrize(
    ("loss", "norm", "right"),
    [(0.500009, 200.0019, True), (0.500011, 200.0, False), (0.5, 200.0021, False), (nan, 200.0, False)],
)
def test_steps_are_compared_to_1e_5_of_values_above_1(loss: float, norm: float, right: bool) -> None:
    _, wrong = compare([(2.0, 0.5), (loss, norm)], [(2.0, 0.5), (0.5, 200.0)])
    assert wrong == ("" if right else f"step 2 has loss {loss:.6f} and norm {norm:.5f}, expected 0.500000 and 200.00000")


def test_a_reason_names_the_line_of_a_library_that_led_to_it() -> None:
    with pytest.raises(ConfigError) as caught:
        try:
            yaml.safe_load("[")
        except yaml.YAMLError as error:
            raise ConfigError("not a list. Write one") from error
    assert re.fullmatch(r"ConfigError: not a list\. \(yaml/parser\.py:\d+\)", reason_of(caught.value))


def test_a_reason_without_a_message_is_the_code() -> None:
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    assert reason_of(caught.value).startswith("AssertionError: raise AssertionError")
