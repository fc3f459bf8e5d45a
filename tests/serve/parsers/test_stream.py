"""The markers that are found in a text do not depend on its chunks, even if markers share prefixes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.call_formats import split_text
from support.random_draws import num_examples

from penstock.serve.parsers.stream import IncrementalText, MarkerSearch, Reader, advance

WORDS = st.text("ab<", min_size=1, max_size=4)


def find_markers(markers: list[str], text: str, sizes: list[int]) -> list[tuple[str, str]]:
    """Return pairs of a text and the marker that follows it. The last marker is empty."""
    stream, result, text_before = IncrementalText(), [], ""

    def read() -> Reader[None]:
        nonlocal text_before
        while True:
            chunk, marker = yield from stream.take_text_or_marker(MarkerSearch(markers))
            text_before += chunk
            if marker:
                result.append((text_before, marker))
                text_before = ""
            elif not chunk:
                return

    reader = read()
    for chunk in split_text(text, sizes):
        stream.push(chunk)
        assert not advance(reader)
    stream.has_ended = True
    assert advance(reader)
    assert stream.taken_text == text
    return [*result, (text_before, "")]


@settings(max_examples=num_examples(200))
@given(
    st.lists(WORDS, min_size=1, max_size=4),
    st.text("ab<", max_size=20),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_found_markers_do_not_depend_on_chunking(markers: list[str], text: str, sizes: list[int]) -> None:
    expected, text_before, position = [], "", 0
    while position < len(text):
        marker_here = max(
            (marker for marker in markers if text.startswith(marker, position)), key=len, default=""
        )
        if marker_here:
            expected.append((text_before, marker_here))
            text_before = ""
        else:
            text_before += text[position]
        position += len(marker_here) or 1
    assert find_markers(markers, text, sizes) == [*expected, (text_before, "")]


def test_the_longer_of_two_markers_with_a_common_prefix_is_found() -> None:
    markers = ["<|channel>", "<|channel>thought\n"]
    assert find_markers(markers, "<|channel>thought\n<|channel>th", [3]) == [
        ("", "<|channel>thought\n"),
        ("", "<|channel>"),
        ("th", ""),
    ]
