"""Where the images of a request stand among its tokens."""

from __future__ import annotations

from hypothesis import given, strategies as st

from dagrl.workers.vllm.media import media_spans

images = st.lists(st.tuples(st.integers(1, 3), st.lists(st.booleans(), max_size=4), st.integers(0, 2)), max_size=5)
"""Each with its id, which tokens after its first stand for it (others are between its tiles), and the text after it."""


@given(st.integers(0, 2), images)
def test_spans_are_those_of_the_images(before: int, given: list[tuple[int, list[bool], int]]) -> None:
    media, expected = [0] * before, []
    for medium, inside, after in given:
        tokens = [-medium, *(medium if stands else 0 for stands in [*inside, True])]
        expected.append((medium, len(media), len(media) + len(tokens)))
        media += [*tokens, *[0] * after]
    assert media_spans(media) == expected
