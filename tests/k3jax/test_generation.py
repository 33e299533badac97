"""The decode loop: against step-by-step argmax, alone and in batches, with every way to end."""

import dataclasses

import jax
import numpy as np
import pytest

import k3jax
from k3jax import step
from k3jax.api import GenerationError
from k3jax.generation import buckets
from k3jax.generation.compilations import Compilations
from k3jax.runtime import Model

PROMPT = [10, 200, 31, 7]


def greedy(model, ids, count):
    """The most likely continuation, each token from a fresh pass over the whole text."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(np.argmax(model.logits(ids)[-1])))
    return ids[-count:]


@pytest.fixture(scope="module")
def continuation(door):
    return greedy(door, PROMPT, 24)


def stream(model, prompt, **options):
    return k3jax.generate(model, prompt, **{"temperature": 0, "as_ids": True, "ignore_eos": True, **options})


def test_tokens_equal_argmax_of_full_passes(door, continuation):
    assert list(stream(door, PROMPT, max_tokens=24)) == continuation


def test_result_and_statistics_describe_the_run(door, continuation):
    run = stream(door, PROMPT, max_tokens=24)
    pieces = list(run)
    result, statistics = run.result, run.statistics
    assert result.ids == pieces == continuation
    assert (result.finish_reason, result.prompt_tokens, result.error) == ("length", 4, None)
    logprobs = jax.nn.log_softmax(door.logits(PROMPT + continuation)[3:-1], axis=-1)
    wanted = np.asarray(logprobs)[np.arange(24), continuation]
    np.testing.assert_allclose(result.logprobs, wanted, rtol=1e-3, atol=1e-4)
    assert (statistics.prompt_tokens, statistics.completion_tokens, statistics.steps) == (4, 24, 23)
    assert statistics.weight_bytes == sum(leaf.nbytes for leaf in door.leaves)
    assert 0 < statistics.prefill_seconds <= statistics.first_token_seconds
    assert statistics.summary()["milliseconds_per_token"] == round(1e3 * statistics.decode_seconds / 23, 3)


def test_results_can_be_asked_for_without_iterating(door, continuation):
    assert stream(door, PROMPT, max_tokens=5).result.ids == continuation[:5]


def test_long_prompts_go_through_chunks(door):
    prompt = np.random.default_rng(0).integers(0, 256, 70).tolist()
    assert [(chunk.start, chunk.size) for chunk in buckets.chunks(70)] == [(0, 64), (64, 64)]
    assert list(stream(door, prompt, max_tokens=4)) == greedy(door, prompt, 4)


def test_a_batch_gives_each_row_what_it_gets_alone(door):
    """Rows of different lengths, and one padding row (three prompts run as four)."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, length).tolist() for length in (3, 60, 33)]
    alone = [stream(door, prompt, max_tokens=12).result for prompt in prompts]
    run = stream(door, prompts, max_tokens=12)
    events = list(run)
    for row, result in enumerate(run.results):
        assert result.ids == alone[row].ids == [piece for at, piece in events if at == row]
        np.testing.assert_allclose(result.logprobs, alone[row].logprobs, rtol=1e-3, atol=1e-4)


def test_random_draws_do_not_depend_on_the_batch(door):
    prompts = [[1, 2], [3, 4, 5], [6]]
    options = {"temperature": 1.2, "top_p": 0.9, "max_tokens": 10}
    together = stream(door, prompts, seed=[5, 6, 7], **options).results
    alone = [stream(door, ids, seed=seed, **options).result for ids, seed in zip(prompts, (5, 6, 7), strict=True)]
    assert [row.ids for row in together] == [row.ids for row in alone]
    again = stream(door, prompts, seed=5, **options).results
    assert [row.ids for row in again] == [row.ids for row in together]
    other = stream(door, prompts, seed=50, **options).results
    assert [row.ids for row in other] != [row.ids for row in together]


def test_stop_ids_end_a_row_and_belong_to_its_ids(door, continuation):
    stop = continuation[5]
    run = stream(door, PROMPT, max_tokens=24, stop_ids=[stop])
    wanted = continuation[: continuation.index(stop) + 1]
    assert list(run) == wanted
    assert run.result.finish_reason == "stop"


def test_end_of_message_and_end_of_document_stop_by_default(door, continuation):
    assert door.stop_ids == (258, 257)
    for name in ("eos_token_id", "bos_token_id"):
        stop = continuation[3] - (name == "bos_token_id")
        model = dataclasses.replace(door, config=dataclasses.replace(door.config, **{name: stop}), tokenizer=None)
        run = stream(model, PROMPT, max_tokens=24, ignore_eos=False)
        assert list(run) == continuation[: continuation.index(continuation[3]) + 1]
        assert run.result.finish_reason == "stop"


def test_max_tokens_is_cut_to_the_cache(door):
    model = dataclasses.replace(door, max_length=len(PROMPT) + 3)
    run = stream(model, PROMPT, max_tokens=100)
    assert len(list(run)) == 3
    assert run.result.finish_reason == "length"


def test_text_ends_before_a_stop_string(door):
    """Text of the same tokens, cut before the string, wherever the borders of tokens lie."""
    options = {"as_ids": False, "max_tokens": 40, "temperature": 1.0, "seed": 3}
    full = stream(door, "def f(", **options)
    text = "".join(full)
    assert text == full.result.text == door.tokenizer.decode(full.result.ids, skip_special=True)
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    run = stream(door, "def f(", stop=["never there", stop], **options)
    pieces = list(run)
    assert "".join(pieces) == run.result.text == text[: text.index(stop)]
    assert "" not in pieces
    assert run.result.finish_reason == "stop"
    assert len(run.result.ids) < len(full.result.ids)


def test_a_stop_string_ends_one_row_and_not_its_neighbours(door):
    options = {"as_ids": False, "max_tokens": 30, "temperature": 1.0, "seed": [3, 4, 5]}
    full = stream(door, ["ab", "cd", "ef"], **options).results
    stop = full[0].text[4:7]
    assert stop not in full[1].text
    assert stop not in full[2].text
    stopped = stream(door, ["ab", "cd", "ef"], stop=stop, **options).results
    assert stopped[0].text == full[0].text[: full[0].text.index(stop)]
    assert [row.finish_reason for row in stopped] == ["stop", "length", "length"]
    assert stopped[1:] == full[1:]


def test_characters_never_come_in_halves(door):
    """Bytes of a four-byte character are sampled one by one; the text shows it once, or U+FFFD at the end."""
    run = stream(door, "x", as_ids=False, max_tokens=60, temperature=1.5, seed=9)
    pieces = list(run)
    assert "".join(pieces) == door.tokenizer.decode(run.result.ids, skip_special=True)


def poisoned(door, token):
    """The model with a NaN in the embedding of one token."""
    weights = door.graph.merge(door.leaves).embedding[...]
    leaves = [leaf.at[token].set(np.nan) if leaf is weights else leaf for leaf in door.leaves]
    return dataclasses.replace(door, leaves=tuple(leaves))


def test_a_row_with_bad_logits_ends_with_an_error_and_its_neighbour_does_not_notice(door, continuation):
    model = poisoned(door, 99)
    run = stream(model, [PROMPT, [99, 1], [1]], max_tokens=8)
    with pytest.raises(GenerationError, match="row 1: logits for position 2 are not finite"):
        list(run)
    good, bad, _ = run.results
    assert good.ids == continuation[:8]
    assert (bad.finish_reason, bad.ids) == ("error", [])


def test_bad_logits_later_end_the_row_there(door, continuation):
    later = next(token for token in continuation[2:] if token not in PROMPT)
    at = continuation.index(later)
    run = stream(poisoned(door, later), PROMPT, max_tokens=24)
    with pytest.raises(GenerationError, match=f"row 0: logits for position {len(PROMPT) + at + 1} "):
        list(run)
    assert run.result.ids == continuation[: at + 1]


def test_padding_rows_are_never_heard(door):
    events = list(stream(door, [[1], [2], [3]], max_tokens=3))
    assert sorted({row for row, _ in events}) == [0, 1, 2]
    assert len(events) == 9


def test_200_prompt_lengths_compile_a_handful_of_programs(door_config, random_tree):
    """Counts the programs of a model of its own: two sizes of chunk, one page table."""
    model = Model.of(door_config, random_tree(door_config, 1))
    lengths = np.random.default_rng(4).integers(1, 250, 200).tolist()
    before = {function: function._cache_size() for function in (step.prefill, step.decode)}
    with Compilations() as compilations:
        for length in lengths:
            assert len(list(stream(model, [1] * length, max_tokens=2))) == 2
    programs = {function: function._cache_size() - count for function, count in before.items()}
    assert programs == {step.prefill: 2, step.decode: 1}
    assert compilations.count <= 12  # with the small operations around them


def test_shapes_stay_few_for_long_prompts():
    """Chunk sizes times page tables of 200 prompts of up to 32,768 tokens."""
    lengths = np.random.default_rng(5).integers(1, 32768, 200).tolist()
    widths = {length: buckets.table_width(length + 256, 32768) for length in lengths}
    shapes = {(chunk.size, widths[length]) for length in lengths for chunk in buckets.chunks(length)}
    assert len(shapes) <= 16


def test_decode_compiles_once_for_each_kind_of_filters_and_never_again(door):
    options = {"max_tokens": 4, "as_ids": True}
    for settings in ({}, {"top_k": 2, "top_p": 0.9}, {"min_p": 0.3}):
        list(stream(door, PROMPT, **options, **settings))
    with Compilations() as compilations:
        for settings in (
            {"temperature": 0.7},
            {"top_k": 3, "top_p": 0.4},
            {"min_p": 0.1, "seed": 8},
            {"stop_ids": [1]},
        ):
            list(stream(door, PROMPT, **options, **settings))
    assert compilations.count == 0


@pytest.mark.parametrize("preset", ["tp2"])
def test_a_mesh_says_the_same(door, door_config, random_tree, continuation, preset):
    from k3jax import params, sharding

    layout = sharding.layout(preset)
    tree = jax.device_put(random_tree(door_config), layout.parameters(params.model_specs(door_config)))
    model = Model.of(door_config, tree, layout=layout)
    before = step.decode._cache_size()
    assert list(stream(model, PROMPT, max_tokens=24)) == continuation
    assert step.decode._cache_size() - before == 1
