"""A tiny random K3 under constraints: whatever it would like to say, what it says is what was asked for."""

import json
import re

import jsonschema
import pytest

from k3jax import parse
from k3jax.tokenizer import Tokenizer, control, convert
from tests.serving import model_fixtures

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"enum": ["x", "yé"]}},
    "required": ["a", "s"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"to": {"enum": ["a", "b"]}}}
TOOLS = [{"type": "function", "function": {"name": "ping", "parameters": PARAMETERS}}]


def is_valid(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CASES = {
    "json_schema": (json.dumps(SCHEMA), is_valid),
    "regex": (r"[a-c]{2,5}/\d", re.compile(r"[a-c]{2,5}/\d").fullmatch),
    "grammar": ('start: "a" b\nb: /x{1,3}/', re.compile("ax{1,3}").fullmatch),
    "choice": (("one", "two three"), {"one", "two three"}.__contains__),
}


@pytest.fixture(scope="module")
def tokenizer(model):
    """As many ids as the model has: UTF-8 has no use for the bytes from 245 on, which are control tokens here."""
    names = [control.END_OF_SEQUENCE, control.END_OF_MESSAGE, control.OPEN, control.CLOSE, control.SEP]
    size = model.config.vocab_size
    tokens = [bytes([byte]) for byte in range(256)]
    names += [f"<|unused_{n}|>" for n in range(size - 245 - len(names))]
    return Tokenizer(convert.build(tokens), tokens[:245], dict(enumerate(names, 245)))


def constrained(tokenizer, kind, value, channel=None, seed=0, temperature=1.0):
    from serving import constraints

    constraint = constraints.compile(kind, value, tokenizer, channel=channel)
    fields = {"constraint": constraint, "eos_ids": tokenizer.eos_ids}
    return model_fixtures.request(model_fixtures.prompt(seed, 5), 80, fields=fields, seed=seed, temperature=temperature)


@pytest.fixture(params=["runner", pytest.param("drafting", marks=pytest.mark.slow)])
def any_runner(request):
    """With and without a draft; the draft's programs take long to compile."""
    return request.getfixturevalue(request.param)


def test_kinds_together(any_runner, tokenizer):
    """All kinds in one batch, beside requests without any, greedy and not."""
    runner, before = any_runner, any_runner.compilations
    items = [
        (kind, constrained(tokenizer, kind, value, channel, seed, temperature))
        for kind, (value, _) in CASES.items()
        for channel in (None, "response")
        for seed, temperature in ((1, 0.0), (2, 1.0), (3, 5.0))
    ]
    free = [model_fixtures.request(model_fixtures.prompt(seed, 5), 9) for seed in range(3)]
    served = model_fixtures.serve(model_fixtures.build_core(runner), *(item for _, item in items), *free)
    for (kind, item), said, final in zip(items, served.said, served.final, strict=False):
        assert final.error is None
        text = parse.parse(tokenizer, said, prefilled="response").content if said[-1] in tokenizer.eos_ids else None
        assert final.finish_reason == "stop", tokenizer.decode(said)
        assert CASES[kind][1](text or tokenizer.decode(said, skip_special=True)), item.id
    alone = model_fixtures.serve(
        model_fixtures.build_core(runner), model_fixtures.request(model_fixtures.prompt(0, 5), 9)
    )
    assert served.said[-3] == alone.said[0]
    # Counted in the whole process, where another fixture may have compiled since this one was ready.
    assert runner.compilations == before


@pytest.mark.slow
def test_a_schema_with_drafts_is_kept_to_by_100_seeds(drafting, tokenizer):
    """D.3 56: a grammar that had seen a rejected draft would soon allow what does not fit."""
    value, is_right = CASES["json_schema"]
    items = [constrained(tokenizer, "json_schema", value, None, seed, temperature=1.5) for seed in range(100)]
    served = model_fixtures.serve(model_fixtures.build_core(drafting), *items)
    assert all(is_right(tokenizer.decode(said, skip_special=True)) for said in served.said)
    assert sum(final.accepted_tokens for final in served.final) > 100


def test_required_calls(runner, tokenizer):
    from serving import constraints

    item = constrained(tokenizer, "structural_tag", constraints.tool_calls(TOOLS), "message", seed=4, temperature=1.0)
    [said] = model_fixtures.serve(model_fixtures.build_core(runner), item).said
    calls = parse.parse(tokenizer, said, prefilled="message").tool_calls
    assert calls
    assert all(json.loads(call.arguments).get("to", "a") in ("a", "b") for call in calls if call.complete)


def test_a_grammar_that_fails_ends_its_request_alone(runner, tokenizer):
    """The constraint is the service's code: its failure is an error of the request, and the neighbours go on."""
    broken = constrained(tokenizer, "choice", ["ab"])
    broken.constraint.advance = lambda tokens: (_ for _ in ()).throw(ValueError("choice: made to fail"))
    good = constrained(tokenizer, "choice", ["ab"], seed=1)
    served = model_fixtures.serve(model_fixtures.build_core(runner), broken, good)
    assert served.final[0].finish_reason == "error"
    assert "made to fail" in served.final[0].error
    assert tokenizer.decode(served.said[1], skip_special=True) == "ab"
