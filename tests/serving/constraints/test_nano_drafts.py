"""Nano with its DSpark draft under grammars: the tokens of the engine without a draft, in fewer steps."""

import json

import jax.numpy as jnp
import pytest

import k3jax
from k3jax import chat
from serving.launch import Sizes, launch
from serving.request import Request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["list", "dict"]},
        "why": {"type": "string", "maxLength": 60},
    },
    "required": ["a", "kind", "why"],
    "additionalProperties": False,
}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {"type": "object", "properties": {"first": DIGIT, "second": DIGIT}, "required": ["first", "second"]}
ADD["additionalProperties"] = False
TOOLS = [{"type": "function", "function": {"name": "add_two_digits", "parameters": ADD}}]
ASK = [{"role": "user", "content": "Write a function that returns the length of a list."}]


def build(draft):
    model = k3jax.load(draft=draft, dtype=jnp.dtype("float32"))
    sizes = Sizes(rows=2, max_length=512, step_tokens=128, table_widths=(8,), prefix_caching=False)
    return model.tokenizer, launch(model, sizes, report=lambda line: None)


def asked(tokenizer):
    from serving import constraints

    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    yield "json_schema", json.dumps(SCHEMA), chat.render(tokenizer, ASK, thinking=False, response_format=form)
    called = {"tools": TOOLS, "tool_choice": "required", "thinking": False}
    yield "structural_tag", json.dumps(constraints.tool_calls(TOOLS)), chat.render(tokenizer, ASK, **called)


def answer(core, tokenizer, kind, value, prompt, **sampling):
    from serving import constraints

    constraint = constraints.after(kind, value, tokenizer, prompt)
    item = Request(
        id="one", tokens=prompt, max_tokens=120, sampling=sampling, constraint=constraint, eos_ids=tokenizer.eos_ids
    )
    core.submit(item)
    return [token for output in core.run()[item.id] for token in output.tokens]


def test_nano_says_the_same_in_fewer_steps(capsys):
    tokenizer, plain = build(None)
    expected = [answer(plain, tokenizer, *item, temperature=0.0) for item in asked(tokenizer)]
    _, core = build("auto")
    for item, tokens, least in zip(asked(tokenizer), expected, (1.6, 4.0), strict=True):
        assert answer(core, tokenizer, *item, temperature=0.0) == tokens
        before = core.counters.steps
        said = sum(len(answer(core, tokenizer, *item, temperature=1.0, seed=seed)) for seed in range(6))
        rate = said / (core.counters.steps - before)
        with capsys.disabled():
            print(f"\n{item[0]}: {rate:.2f} tokens a step at temperature 1")
        assert rate >= least
