import ast
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from k3jax import tokenizer
from k3jax.tokenizer import train as tokenizer_train
from k3jax.train import corpus, exercises, instructions, tokens
from k3jax.train.corpus import Source


class Distribution(metadata.Distribution):
    """An installed package that consists of its metadata."""

    def __init__(self, *fields: str) -> None:
        self.text = "Metadata-Version: 2.4\n" + "".join(field + "\n" for field in fields)

    def read_text(self, filename: str) -> str | None:
        return self.text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", True),
        ("BSD-3-Clause AND MIT", True),
        ("Apache Software License", True),
        ("Apache License, Version 2.0", True),
        ("3-Clause BSD License", True),
        ("Python Software Foundation License", True),
        ("GPL-3.0", False),
        ("BSD-3-Clause AND GPL-3.0-or-later", False),
        ("MPL-2.0 AND MIT", False),
        ("LGPLv2", False),
        ("Proprietary", False),
        ("", False),
    ],
)
def test_only_permissive_expressions_pass(licence: str, expected: bool) -> None:
    assert corpus.is_permissive(licence) == expected


def test_classifiers_outrank_free_text_and_one_bad_one_rejects() -> None:
    mit, gpl = (f"Classifier: License :: OSI Approved :: {name}" for name in ("MIT License", "GNU GPL v3 (GPLv3)"))
    good = Distribution(mit, "License: see file")
    mixed = Distribution(mit, gpl)
    silent = Distribution("Name: unknown")
    expression = Distribution("License-Expression: GPL-2.0", mit)
    found = [corpus.licence_of(d) for d in (good, mixed, silent, expression)]
    assert found == ["MIT License", None, None, None]


def lines(seed: int, count: int = 40) -> str:
    generator = np.random.default_rng(seed)
    return "\n".join(f"variable_{generator.integers(10**6)} = another_name * some_value" for _ in range(count)) + "\n"


def test_near_duplicates_are_dropped_whatever_the_order() -> None:
    original = lines(0)
    copy = original.replace("variable_1", "changed_1", 1) + lines(1, 8)
    sources = [Source("a", "MIT", f"{i}.py", text) for i, text in enumerate((original, copy, lines(2), lines(3)))]
    kept = {source.name for source in corpus.without_duplicates(sources)}
    assert kept == {source.name for source in corpus.without_duplicates(sources[::-1])}
    assert len({"0.py", "1.py"} & kept) == 1
    assert {"2.py", "3.py"} <= kept


def test_the_split_is_by_file_and_stable() -> None:
    sources = [Source("package", "MIT", f"module_{i}.py", "text") for i in range(4000)]
    held_out = {source.name for source in sources if source.held_out}
    assert 0.012 < len(held_out) / 4000 < 0.028
    renamed = [source._replace(text="other text") for source in sources]
    assert held_out == {source.name for source in renamed if source.held_out}


def test_unreadable_and_generated_files_are_left_out(tmp_path: Path) -> None:
    cases = {
        "good.py": lines(4).encode(),
        "binary.py": b"\x00\xff" * 400,
        "latin.py": ("# caf\xe9\n" * 100).encode("latin-1"),
        "long.py": b"x = 1\n" * 100 + b"y" * 1000,
        "generated.py": b"# Automatically generated file, do not edit\n" + lines(5).encode(),
        "table.py": b"1, 2, 3, 4, 5, 6, 7, 8\n" * 60,
        "short.py": b"x = 1\n",
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    assert [name for name in cases if corpus.readable(tmp_path / name) is not None] == ["good.py"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Source]]:
    directory = tmp_path_factory.mktemp("corpus")
    root = Path(corpus.__file__).parents[1]
    sources = corpus.collect(root=root)
    tokenizer_train.train([source.text for source in sources], 600, directory)
    tokens.write_corpus(sources, directory, directory, workers=1)
    return directory, sources


def test_packed_ids_decode_to_the_files_with_eos_between(prepared: tuple[Path, list[Source]]) -> None:
    directory, sources = prepared
    encoder = tokenizer.load(directory)
    end = encoder.control_id("[EOS]")
    for name, held_out in ((tokens.TRAINING, False), (tokens.VALIDATION, True)):
        ids = np.load(directory / name)
        texts = [source.text for source in sources if source.held_out == held_out]
        assert int((ids == end).sum()) == len(texts)
        pieces = np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]
        assert [encoder.decode(piece[:-1].tolist()) for piece in pieces] == texts


def test_the_table_of_documents_points_at_each_file(prepared: tuple[Path, list[Source]]) -> None:
    directory, sources = prepared
    encoder = tokenizer.load(directory)
    for split in ("training", "validation"):
        ids = np.load(directory / f"{split}.npy")
        found = {
            entry.name: ids[entry.start : entry.start + entry.tokens] for entry in tokens.documents(directory, split)
        }
        expected = {source.name: source.text for source in sources if source.held_out == (split == "validation")}
        assert {name: encoder.decode(part.tolist()) for name, part in found.items()} == expected


def test_a_stored_list_selects_the_same_files_and_drops_changed_ones(
    prepared: tuple[Path, list[Source]], tmp_path: Path
) -> None:
    directory, sources = prepared
    for source in sources:
        path = tmp_path / source.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.text, encoding="utf-8")
    changed, extra = tmp_path / sources[0].name, tmp_path / "another.py"
    changed.write_text(sources[0].text + "# one more line\n", encoding="utf-8")
    extra.write_text(lines(9), encoding="utf-8")
    found = corpus.collect(root=tmp_path, listed=directory / tokens.SOURCES)
    assert found == sources[1:]
    assert len(corpus.collect(root=tmp_path)) == len(sources) + 1


def test_windows_cover_every_token_once_an_epoch_and_depend_on_the_step_alone() -> None:
    ids = np.arange(1001, dtype=np.uint16)
    windows = tokens.Windows(ids, length=10, rows=4, seed=3)
    batches = [windows.batch(step) for step in range(25)]
    assert sorted(np.concatenate(batches)[:, :-1].ravel().tolist()) == list(range(1000))
    assert all((batch[:, 1:] == batch[:, :-1] + 1).all() for batch in batches)
    again = tokens.Windows(ids, length=10, rows=4, seed=3)
    np.testing.assert_array_equal(again.batch(17), batches[17])
    assert not np.array_equal(again.batch(25), batches[0])
    with pytest.raises(ValueError, match="the corpus has 5 tokens, expected more than one window of 10"):
        tokens.Windows(ids[:5], length=10, rows=1, seed=0)


MODULE = '''
def area(width, height):
    """Return the area of a rectangle.

    Both sides are in metres.
    """
    return width * height


def _note(text):
    """A helper for notes."""
    return text


class Shape:
    def scale(self, factor):
        """Multiply every side by a factor."""
        return factor
'''


def test_documented_functions_become_requests_and_answers(prepared: tuple[Path, list[Source]]) -> None:
    [function] = instructions.documented_functions(MODULE)
    assert function.task == "returns the area of a rectangle"
    assert function.details == "Both sides are in metres."
    assert function.code == "def area(width, height):\n    return width * height\n"
    encoder = tokenizer.load(prepared[0])
    for seed in range(6):
        prompt, completion = (encoder.decode(ids) for ids in instructions.conversation(function, encoder, seed))
        assert prompt.endswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
        think, answer = completion.split("<|close|>think<|sep|><|open|>response<|sep|>")
        code, rest = answer.split("<|close|>response<|sep|>")
        assert rest == "<|close|>message<|sep|><|end_of_msg|>"
        assert code == function.code
        assert "area of a rectangle" in think
        assert ("Both sides" in think) == ("thinking_effort=max" in prompt)
        assert ("`area`" in think) == ("thinking_effort=low" not in prompt)


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Compute the sum.", "computes the sum"),
        ("Apply a filter", "applies a filter"),
        ("Search for it", "searches for it"),
        ("Returns the name", "returns the name"),
        ("The name of it", None),
        ("Word", None),
    ],
)
def test_third_person(sentence: str, expected: str | None) -> None:
    assert instructions.third_person(sentence) == expected


def test_chat_windows_hold_whole_conversations(prepared: tuple[Path, list[Source]]) -> None:
    directory, sources = prepared
    sizes = tokens.write_chat(sources[::3], directory, directory, 1, length=500, seed=0, most=20)
    ids, weight = (np.load(directory / name) for name in tokens.CHAT)
    encoder = tokenizer.load(directory)
    assert sizes["chat_windows"] == len(ids) >= 2
    for row, row_weight in zip(ids, weight, strict=True):
        text = encoder.decode(row.tolist())
        assert text.startswith('<|open|>message role="system" type="thinking-effort"')
        learnt = encoder.decode(row[1:][row_weight >= 1].tolist())
        assert learnt.count("<|end_of_msg|>") == text.count("<|open|>response<|sep|>")
        for answer in learnt.split("<|open|>response<|sep|>")[1:]:
            ast.parse(answer.split("<|close|>response<|sep|>")[0])
        assert not row_weight[row[1:] == encoder.control_id("[PAD]")].any()


def test_the_end_of_an_answer_weighs_more(prepared: tuple[Path, list[Source]]) -> None:
    [function] = instructions.documented_functions(MODULE)
    encoder = tokenizer.load(prepared[0])
    _, completion = instructions.conversation(function, encoder, 0)
    weights = instructions.completion_weights(completion, encoder)
    heavy = [id_ for id_, weight in zip(completion, weights, strict=True) if weight == instructions.END_WEIGHT]
    assert encoder.decode(heavy) == "\n<|close|>"
    assert weights.count(1.0) == len(completion) - 2
    where = weights.index(instructions.END_WEIGHT)
    assert encoder.decode(completion[where + 1 :]).startswith("<|close|>response<|sep|><|close|>message")


def test_exercises_are_valid_functions_and_none_is_on_the_fixed_list() -> None:
    found = list(exercises.exercises(2000, 0))
    assert found == list(exercises.exercises(2000, 0)) != list(exercises.exercises(2000, 1))
    assert len({exercise.code for exercise in found}) > 800
    for exercise in found:
        [function] = ast.parse(exercise.code).body
        assert isinstance(function, ast.FunctionDef)
        assert function.name == exercise.name
        assert tuple(argument.arg for argument in function.args.args) == exercise.arguments
    tasks = Path(__file__).with_name("tasks.txt").read_text(encoding="utf-8").splitlines()
    fixed = {task.rstrip(".").split(" function that ")[1] for task in tasks}
    assert len(fixed) == 10
    assert not fixed & {exercise.task for exercise in found}
