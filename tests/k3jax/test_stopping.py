"""Stop strings across the borders of pieces."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from k3jax.generation.stopping import StopStrings

TEXTS = st.text(alphabet="ab\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def earliest(text: str, stops: list[str]) -> int | None:
    """Where the text is cut: growing it character by character, the first time it ends with a stop string."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@hypothesis.given(TEXTS, STOPS, st.lists(st.integers(0, 30), max_size=6))
def test_any_pieces_give_the_text_up_to_the_first_stop(text, stops, cuts):
    borders = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    stream, shown, stopped = StopStrings(stops), "", False
    for start, end in itertools.pairwise(borders):
        piece, stopped = stream.push(text[start:end])
        shown += piece
        if stopped:
            break
    cut = earliest(text, stops)
    assert stopped == (cut is not None)
    assert shown + ("" if stopped else stream.finish()) == text[:cut]


@hypothesis.given(TEXTS, STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(text, stops):
    stream, shown = StopStrings(stops), ""
    for character in text:
        piece, stopped = stream.push(character)
        shown += piece
        if stopped:
            return
    held = text[len(shown) :]
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stops_everything_passes():
    assert StopStrings(()).push("anything") == ("anything", False)


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopStrings(["x", ""])
