"""A stop string cuts at the same place however the text is split."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pageray.router.stop_strings import StopStringFilter

ALPHABET = st.text("ab", min_size=0, max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def by_definition(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """Character by character: the first end of a stop string, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return (text[:end] if include_stop else text[: end - len(longest)]), longest
    return text, None


def run(pieces: list[str], stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    stop_filter = StopStringFilter(stops, include_stop=include_stop)
    shown = ""
    for piece in pieces:
        result = stop_filter.push(piece)
        shown += result.text
        if result.stop is not None:
            return shown, result.stop
    return shown + stop_filter.release(), None


@settings(max_examples=400)
@given(pieces=st.lists(ALPHABET, max_size=8), stops=STOPS, include_stop=st.booleans())
def test_any_split_gives_the_definition(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    expected = by_definition("".join(pieces), stops, include_stop)
    assert run(pieces, stops, include_stop) == expected


@settings(max_examples=200)
@given(pieces=st.lists(ALPHABET, max_size=8), stops=STOPS)
def test_nothing_shown_is_ever_taken_back(pieces: list[str], stops: list[str]) -> None:
    final, _ = by_definition("".join(pieces), stops, include_stop=False)
    stop_filter = StopStringFilter(stops)
    shown = ""
    for piece in pieces:
        result = stop_filter.push(piece)
        shown += result.text
        assert final.startswith(shown)
        if result.stop is not None:
            break


def test_only_what_may_become_a_stop_string_is_withheld() -> None:
    stop_filter = StopStringFilter(["</end>"])
    assert stop_filter.push("text </").text == "text "
    assert stop_filter.push("other").text == "</other"
    assert stop_filter.push("<").text == ""
    assert stop_filter.release() == "<"


def test_an_empty_stop_string_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        StopStringFilter([""])
