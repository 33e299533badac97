import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.retention import DEFAULT_INTERVAL, Retention, RetentionError


@pytest.mark.parametrize(
    "text", ["prompt", "interval=4096", "marconi", "decode-end", "prompt,interval=64,marconi,decode-end,supersede", ""]
)
def test_text_and_back(text):
    assert str(Retention.parse(text)) == text


def test_interval_has_a_default():
    assert Retention.parse("interval").interval == DEFAULT_INTERVAL


@pytest.mark.parametrize("text", ["promt", "interval=x", "interval=0", "interval=-4", "prompt=3"])
def test_bad_text_is_named(text):
    with pytest.raises(RetentionError, match="retention"):
        Retention.parse(text)


def test_interval_must_fit_the_unit():
    Retention(interval=128).check(64)
    with pytest.raises(RetentionError, match="100 tokens, expected a multiple of the hash unit \\(64\\)"):
        Retention(interval=100).check(64)


@pytest.mark.parametrize(("tokens", "expected"), [(63, []), (64, []), (65, [64]), (128, [64]), (129, [128])])
def test_prompt_boundary_leaves_a_token_to_compute(tokens, expected):
    policy = Retention(marconi=False)
    assert policy.boundaries(unit=64, tokens=tokens, cached=0, reach=0) == expected


def test_interval_and_junction():
    policy = Retention(prompt=False, interval=128, marconi=True)
    assert policy.boundaries(unit=64, tokens=600, cached=0, reach=0) == [128, 256, 384, 512]
    assert policy.boundaries(unit=64, tokens=600, cached=256, reach=320) == [320, 384, 512]
    assert policy.boundaries(unit=64, tokens=600, cached=320, reach=320) == [384, 512]


@given(
    unit=st.integers(1, 7),
    every=st.integers(0, 4),
    tokens=st.integers(1, 90),
    cached=st.integers(0, 90),
    reach=st.integers(0, 100),
)
def test_boundaries_are_ascending_units_inside_the_prompt(unit, every, tokens, cached, reach):
    cached = min(cached, tokens - 1)
    policy = Retention(interval=every * unit)
    found = policy.boundaries(unit=unit, tokens=tokens, cached=cached, reach=reach)
    assert found == sorted(set(found))
    assert all(cached < b < tokens and b % unit == 0 for b in found)
