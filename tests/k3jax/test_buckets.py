"""Static shapes: what they cover, how few they are, how little they waste."""

import itertools

import pytest

from k3jax.generation import buckets


@pytest.mark.parametrize("length", [*range(1, 140), 511, 512, 513, 2047, 2048, 2049, 5000])
def test_chunks_cover_a_prompt_and_waste_less_than_half(length):
    chunks = list(buckets.chunks(length))
    assert chunks[0].start == 0
    for before, after in itertools.pairwise(chunks):
        assert after.start == before.start + before.size
    end = chunks[-1].start + chunks[-1].size
    assert chunks[-1].start < length <= end
    assert {chunk.size for chunk in chunks} <= set(buckets.CHUNKS)
    assert end - length < max(buckets.CHUNKS[0], length)


def test_page_tables_are_few_and_never_wider_than_the_longest_sequence():
    widths = {buckets.table_width(tokens, 1 << 20) for tokens in range(1, 1 << 20, 777)}
    assert len(widths) <= 11
    for tokens in (1, 64, 65, 256, 257, 4000, 30000, 700000):
        assert buckets.table_width(tokens, 1 << 20) * buckets.PAGE_SIZE >= tokens
    assert buckets.table_width(257, 600) == 10
    assert buckets.table_width(1, 64) == 1
    assert buckets.table_width(1, 1 << 20) == buckets.NARROWEST


@pytest.mark.parametrize(("count", "least", "wanted"), [(1, 1, 1), (3, 1, 4), (4, 1, 4), (5, 1, 8), (3, 32, 32)])
def test_powers_of_two(count, least, wanted):
    assert buckets.power_of_two(count, least) == wanted


def test_prompts_of_up_to_2000_tokens_run_through_five_programs():
    lengths = range(1, 2001)
    widths = {length: buckets.table_width(length + 256, 1 << 20) for length in lengths}
    shapes = {(chunk.size, widths[length]) for length in lengths for chunk in buckets.chunks(length)}
    assert len(shapes) <= 5
    assert max(len(list(buckets.chunks(length))) for length in lengths) <= 8
