"""Prefixes that leave an engine as bytes and come back."""

import dataclasses

import pytest

from serving.exchange import ExchangeError, ExportedPrefix, export_prefix, import_prefix
from serving.hashing import ImageSpan
from serving.prefix_file import Prefix
from tests.serving.model_fixtures import build_core, prompt, request, serve


@pytest.fixture
def exported(runner):
    core, tokens = build_core(runner), prompt(90, 21)
    serve(core, request(tokens, 5, fields={"salt": "mine"}))
    found = export_prefix(core, [*tokens, 1, 2], salt="mine")
    assert export_prefix(core, tokens, salt="other") is None
    return found


def test_a_prefix_travels_as_bytes(runner, alone, exported):
    """The reader says what it would say without it; states, windows and pages are all there."""
    data, tokens, core = exported.to_bytes(), prompt(90, 21), build_core(runner)
    assert exported.tokens == tokens[:20]
    assert import_prefix(core, ExportedPrefix.from_bytes(data))
    assert not import_prefix(core, ExportedPrefix.from_bytes(data)), "it is there already"
    core.check_books()
    served = serve(core, request(tokens, 7, fields={"salt": "mine"}))
    assert served.said == [alone(tokens, 7)]
    assert served.final[0].cached_tokens == 20
    assert serve(core, request(tokens, 7)).final[0].cached_tokens == 0, "another salt"


@pytest.mark.slow
def test_the_draft_s_rows_travel_too(drafting, alone):
    core, tokens = build_core(drafting), prompt(91, 21)
    serve(core, request(tokens, 5))
    data = export_prefix(core, tokens).to_bytes()
    core = build_core(drafting)
    assert import_prefix(core, ExportedPrefix.from_bytes(data))
    served = serve(core, request(tokens, 9))
    assert (served.said, served.final[0].cached_tokens) == ([alone(tokens, 9)], 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_id": "elsewhere"}, "is of model 'elsewhere', this engine runs ''"),
        ({"page_size": 16}, "pages of 16 tokens, this engine has 8"),
        ({"tokens": []}, "has no tokens"),
        ({"tokens": list(range(40))}, r"has an array .*\(3, 8, .*expects .*\(5, 8,"),
    ],
)
def test_what_does_not_fit_is_refused(runner, exported, change, message):
    core = build_core(runner)
    with pytest.raises(ExchangeError, match=message):
        import_prefix(core, dataclasses.replace(exported, **change))
    core.check_books()
    assert not core.cache.slots.used


def test_damage_is_seen(exported):
    data = bytearray(exported.to_bytes())
    data[-100] ^= 1
    with pytest.raises(ExchangeError, match="checksum differs"):
        ExportedPrefix.from_bytes(bytes(data))
    for size in (0, 10, len(data) // 2):
        with pytest.raises(ExchangeError, match="not an exported prefix"):
            ExportedPrefix.from_bytes(exported.to_bytes()[:size])
    with pytest.raises(ExchangeError, match="not an exported prefix: 'model_id'"):
        ExportedPrefix.from_bytes(exported.to_bytes().replace(b'"model_id"', b'"model"', 1))
    with pytest.raises(ExchangeError, match="format 'other'"):
        ExportedPrefix.from_bytes(exported.to_bytes().replace(b"k3jax prefix 1", b"other", 1))


def test_no_memory_leaves_the_books_alone(runner, exported):
    core = build_core(runner, pages=4)
    core.cache.pages.take(2)
    with pytest.raises(ExchangeError, match="no memory for 3 pages"):
        import_prefix(core, exported)
    assert (core.cache.pages.used, core.cache.slots.used) == (2, 0)


def test_images_are_part_of_the_name(make_core):
    from serving.request import Request

    core, image = make_core(), ImageSpan(2, 3, b"cat")
    core.submit(Request(id="a", tokens=list(range(12)), max_tokens=2, images=(image,)))
    core.run()
    found = export_prefix(core, list(range(12)), images=(image,))
    assert export_prefix(core, list(range(12))) is None
    assert ExportedPrefix.from_bytes(found.to_bytes()).images == (image,)


def test_a_fake_device_without_transfer_is_named(make_core):
    core = make_core()
    core.runner = object()
    with pytest.raises(ExchangeError, match="object cannot move prefixes"):
        import_prefix(
            core, ExportedPrefix(model_id="", salt="", page_size=4, tokens=[1], images=(), prefix=Prefix([], [], []))
        )
