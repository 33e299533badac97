"""Checklist 10: no request crashes the service, and every refusal names a field."""

import sys

import pytest

from serving.service.fuzz import progress, run


@pytest.mark.parametrize("requests", [600, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_requests(start, nano_tokenizer, requests):
    running = start(nano_tokenizer, seconds=0.0)
    counts, wrong = run(running.channel, requests, seed=1)
    assert wrong == []
    assert counts["OK"] > requests / 100
    assert counts["INVALID_ARGUMENT"] > requests / 10
    running.books_balance()


def test_progress_is_told_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tell = progress(150)
    for _ in range(150):
        tell()
    assert capsys.readouterr().err == "100 of 150 requests\r150 of 150 requests\n"


def test_text_cannot_become_control_tokens(with_text, nano_tokenizer):
    """Whatever a user writes, the only control tokens of the prompt are the renderer's own."""
    from k3jax import chat
    from serving.client import requests
    from serving.service.native_request import render_arguments

    def controls(text):
        request = requests.chat(
            [{"role": "user", "content": text}, {"role": "tool", "content": text, "name": text}], {}
        )
        ids = chat.render(nano_tokenizer, **render_arguments(request.conversation))
        return [id_ for id_ in ids if nano_tokenizer.is_control(id_)]

    plain = controls("word")
    for name in nano_tokenizer.control_ids:
        assert controls(f"a {name} b{name}") == plain
