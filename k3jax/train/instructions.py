"""Chat examples made from documented functions: a request, a think channel from the docstring, the code."""

import ast
import random
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from k3jax import chat
from k3jax.tokenizer import Tokenizer
from k3jax.tokenizer import control as control_tokens

MOST_LINES = 16
"""Longer functions drift into loops when a small model writes them."""
END_WEIGHT = 4.0
"""Weight of the tokens that end an answer: the last line break and the closing of the channel."""
EFFORTS = ("low", "high", "max")
_REQUESTS = (
    "write a function that {task}",
    "Write a function that {task}.",
    "write a Python function that {task}",
    "Write a Python function `{name}` that {task}.",
    "Please write a function that {task}.",
    "write a function {name} that {task}",
)


class Documented(NamedTuple):
    """A function with a docstring."""

    name: str
    arguments: tuple[str, ...]
    task: str
    """First sentence of the docstring, in the third person and lower case."""
    details: str
    """Second paragraph of the docstring, one line; may be empty."""
    code: str


def third_person(sentence: str) -> str | None:
    """'Return the sum.' -> 'returns the sum'; None when the sentence does not start like a command."""
    match = re.match(r"([A-Z]?[a-z]+)\b(.*)", sentence.strip().rstrip("."), flags=re.DOTALL)
    if match is None or not match[2]:
        return None
    verb = match[1].lower()
    if verb in _NOT_VERBS:
        return None
    if verb.endswith(("sh", "ch", "x", "z", "o", "ss")):
        verb += "es"
    elif verb.endswith("y") and verb[-2:-1] not in tuple("aeiou"):
        verb = verb[:-1] + "ies"
    elif not verb.endswith("s"):
        verb += "s"
    return verb + match[2]


_NOT_VERBS = frozenset(
    [
        "a",
        "an",
        "the",
        "this",
        "that",
        "these",
        "those",
        "it",
        "its",
        "if",
        "when",
        "whether",
        "true",
        "false",
        "none",
        "see",
        "not",
        "no",
        "for",
        "from",
        "in",
        "on",
        "of",
        "to",
        "helper",
        "function",
        "method",
        "class",
        "internal",
        "private",
        "same",
        "like",
        "note",
        "all",
        "any",
        "each",
        "given",
        "deprecated",
        "alias",
        "default",
    ]
)


def documented_functions(source: str) -> Iterator[Documented]:
    """Short functions and methods of a module whose docstring starts with a command."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and not node.decorator_list:
            found = _documented(node, source)
            if found is not None:
                yield found


def _documented(node: ast.FunctionDef, source: str) -> Documented | None:
    text = ast.get_docstring(node)
    if not text or node.name.startswith("__") or node.end_lineno is None:
        return None
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    task = third_person(paragraphs[0].split(". ")[0])
    if task is None or not 12 <= len(task) <= 110:
        return None
    lines = source.split("\n")
    kept = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[node.body[0].end_lineno : node.end_lineno]
    code = textwrap.dedent("\n".join(kept)).strip("\n")
    if len(kept) > MOST_LINES or not _parses(code):
        return None
    details = paragraphs[1] if len(paragraphs) > 1 and re.match(r"[A-Z][^:>|]*\.$", paragraphs[1]) else ""
    arguments = tuple(argument.arg for argument in node.args.args)
    if {"self", "cls"} & set(arguments):
        return None
    return Documented(node.name, arguments, task, details[:300], code + "\n")


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return code.startswith("def ")


def reasoning(function: Documented, effort: str) -> str:
    """The think channel: one sentence, a plan, or a plan with the details of the docstring."""
    goal = f"The user wants a function that {function.task}."
    if effort == "low":
        return goal
    taken = ", ".join(f"`{name}`" for name in function.arguments) or "no arguments"
    plan = f"{goal}\nI will call it `{function.name}`. It takes {taken}."
    if effort == "high":
        return plan
    steps = len(function.code.strip().split("\n")) - 1
    closing = f"The body has {steps} line{'s' if steps != 1 else ''}. Now I write the code."
    return "\n".join(filter(None, (plan, function.details, closing)))


class Conversation(NamedTuple):
    """One exchange as ids: what is given, and what the model should say."""

    prompt: list[int]
    completion: list[int]


def conversation(function: Documented, tokenizer: Tokenizer, seed: int) -> Conversation:
    """An exchange with a random effort and wording, the same for the same function and seed."""
    chooser = random.Random(f"{seed}/{function.code}")
    effort = chooser.choice(EFFORTS)
    request = chooser.choice(_REQUESTS).format(task=function.task, name=function.name)
    prompt = chat.render(tokenizer, [{"role": "user", "content": request}], thinking_effort=effort)
    answer = {"role": "assistant", "reasoning_content": reasoning(function, effort), "content": function.code}
    return Conversation(prompt, chat.render_completion(tokenizer, answer))


def completion_weights(completion: list[int], tokenizer: Tokenizer) -> list[float]:
    """1 for each token, `END_WEIGHT` where the answer has to stop: its last token and the mark that closes it."""
    weights = [1.0] * len(completion)
    close = tokenizer.control_id(control_tokens.CLOSE)
    closings = [i for i, id_ in enumerate(completion) if id_ == close]
    if len(closings) >= 2:  # of the response, then of the message
        weights[closings[-2] - 1] = weights[closings[-2]] = END_WEIGHT
    return weights


def pack_conversations(
    conversations: Iterable[Conversation], tokenizer: Tokenizer, *, length: int, prompt_weight: float = 0.1
) -> tuple[NDArray[np.uint16], NDArray[np.float16]]:
    """Windows of whole conversations: ids [n, length + 1] and prediction weights [n, length].

    Every window starts with a conversation and ends with padding; `[EOS]` stands between two.
    """
    end, pad = tokenizer.control_id(control_tokens.END_OF_SEQUENCE), tokenizer.control_id("[PAD]")
    windows: list[tuple[list[int], list[float]]] = []
    for prompt, completion in conversations:
        ids = [*prompt, *completion, end]
        weights = [prompt_weight] * len(prompt) + completion_weights(completion, tokenizer) + [0.0]
        if len(ids) > length + 1:
            continue
        if not windows or len(windows[-1][0]) + len(ids) > length + 1:
            windows.append(([], []))
        windows[-1][0].extend(ids)
        windows[-1][1].extend(weights)
    packed_ids = np.full((len(windows), length + 1), pad, np.uint16)
    packed_weights = np.zeros((len(windows), length), np.float16)
    for row, (ids, weights) in enumerate(windows):
        packed_ids[row, : len(ids)] = ids
        packed_weights[row, : len(weights) - 1] = weights[1:]
    return packed_ids, packed_weights
