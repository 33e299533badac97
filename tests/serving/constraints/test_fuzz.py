"""Whatever is sent as a constraint: it works, or it is refused by name; nothing else may be raised."""

import contextlib
import json
import random

import pytest

from tests.serving.constraints.conftest import StillSpeaking

SEEDS = {
    "json_schema": [
        '{"type":"object","properties":{"a":{"type":"integer","minimum":1},"b":{"enum":["x",1,null]}},"required":["a"]}',
        '{"type":"array","items":{"$ref":"#/$defs/x"},"minItems":1,"$defs":{"x":{"anyOf":[{"type":"null"},{"const":2}]}}}',
        '{"type":["string","number"],"pattern":"^[a-z]+$","maxLength":9,"format":"date","multipleOf":0.5}',
        '{"allOf":[{"properties":{"k":{"type":"boolean"}}},{"additionalProperties":{"type":"string"}}]}',
    ],
    "regex": [r"[a-z]{1,3}(x|y)*\d+", r"^(?i)ab+?$", r"[^\s\"\\]*\p{Han}", "(?s:.*)a(b|c){2,}"],
    "grammar": [
        'start: a b*\na: "x" | /[0-9]+/\nb: a "," a\n%ignore /[ ]+/',
        'root ::= "a" (b | [c-e]+)*\nb ::= "x"? "y"',
        'start: %json {"type":"string"} "z"\n',
    ],
    "structural_tag": [
        '{"format":{"type":"triggered_tags","triggers":["<|open|>tools<|sep|>","<f"],"tags":[{"begin":"<|open|>tools<|sep|>",'
        '"content":{"type":"plus","content":{"type":"or","elements":[{"type":"regex","pattern":"a"},{"type":"any_text",'
        '"excludes":["b"]}]}},"end":"<|close|>tools<|sep|>"},{"begin":"<f>","content":{"type":"json_schema","json_schema":'
        '{"type":"integer"}},"end":"</f>"}],"at_least_one":true}}',
        '{"format":{"type":"tags_with_separator","separator":",","tags":[{"begin":"(","content":{"type":"sequence","elements":'
        '[{"type":"const_string","value":"v"},{"type":"optional","content":{"type":"star","content":{"type":"regex",'
        '"pattern":"[0-9]"}}}]},"end":[")"]}]}}',
        '{"structures":[{"begin":"<fn=a>","schema":{"type":"object"},"end":"</fn>"}],"triggers":["<fn="]}',
    ],
}  # fmt: skip
CHANNELS = (None, "think", "response", "message")
ODD = [None, True, 0, -1, 1.5, 10**30, "", "x", [], {}, ["a", 1], {"type": "regex"}, "<|open|>", "\ud800", 'é\n/"\\']


def mutated(text, rng):
    """JSON with a value replaced, dropped, nested or doubled; or text with characters changed."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if value is None or rng.random() < 0.25:
        letters = list(text)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(letters))
            letters[at : at + rng.randint(0, 3)] = rng.choice(
                ["", "(", "[", "{", "*", "\\", '"', "é", "/", "\n", letters[at] * 3]
            )
        return "".join(letters)
    places = []

    def walk(node):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            places.append((node, key))
            walk(child)

    walk(value)
    for _ in range(rng.randint(1, 2)):
        node, key = rng.choice(places)
        if not (key < len(node) if isinstance(node, list) else key in node):
            continue
        change = rng.randrange(4)
        if change == 0:
            node[key] = rng.choice(ODD)
        elif change == 1:
            del node[key]
        elif change == 2:
            node[key] = json.loads(json.dumps({"type": "plus", "content": node[key]}))
        elif isinstance(node, dict):
            node[rng.choice(["type", "format", "items", "tags", "end", "begin", "excludes", "enum"])] = node[key]
    try:
        return json.dumps(value)
    except ValueError:  # it has become a part of itself
        return text


def attempt(tokenizer, speak, rng, kind):
    from serving import constraints

    value = mutated(rng.choice(SEEDS[kind]), rng)
    try:
        constraint = constraints.compile(kind, value, tokenizer, channel=rng.choice(CHANNELS))
        with contextlib.suppress(StillSpeaking):
            speak(constraint, rng.randrange(1000), limit=25)
    except constraints.ConstraintError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", SEEDS)
@pytest.mark.parametrize("rounds", [40, pytest.param(4000, marks=pytest.mark.slow)])
def test_mutated_constraints(tokenizer, speak, kind, rounds):
    rng = random.Random(f"{kind} {rounds}")
    errors = [attempt(tokenizer, speak, rng, kind) for _ in range(rounds)]
    refused = [error for error in errors if error is not None]
    assert 0 < len(refused) < rounds
    assert all(error.startswith(f"{kind}: ") and "\n" not in error for error in refused)


def test_deep_nesting(tokenizer):
    from serving import constraints

    deep = '{"type":"plus","content":' * 5000 + '{"type":"const_string","value":"a"}' + "}" * 5000
    for kind, value in {
        "structural_tag": f'{{"format":{deep}}}',
        "json_schema": '{"items":' * 5000 + "{}" + "}" * 5000,
        "regex": "(" * 5000 + "a" + ")" * 5000,
        "grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000,
    }.items():
        with pytest.raises(constraints.ConstraintError):
            constraints.compile(kind, value, tokenizer)
