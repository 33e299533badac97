"""The program `python -m k3jax.decode`: what it prints, where, and how it ends."""

import dataclasses
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
import k3jax
from k3jax import api, decode, program
from k3jax.chat.stream import DIM, PLAIN, ChannelPrinter
from k3jax.speculation.drafters import Draft, NgramDrafter, Proposal

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--prompt", "def f(", "--max-tokens", "12", "--seed", "4"]


@pytest.fixture
def program_model(monkeypatch, door):
    """The program gets the shared model instead of compiling its own."""
    seen = {}

    def load(path, **options):
        seen.update(path=path, **options)
        return door

    monkeypatch.setattr(api, "load", load)
    return seen


@pytest.fixture
def expected(door):
    return k3jax.generate(door, "def f(", max_tokens=12, seed=4)


class Input:
    """Standard input that is no terminal."""

    def __init__(self, data: bytes):
        self.buffer = io.BytesIO(data)

    def isatty(self) -> bool:
        return False


def run(*arguments: str) -> subprocess.CompletedProcess:
    """The program in a process of its own, without any setting of the tests."""
    command = [sys.executable, "-m", "k3jax.decode", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def test_text_goes_to_standard_output_and_nothing_else(program_model, expected, capsys):
    assert decode.main(OPTIONS) == 0
    out, err = capsys.readouterr()
    assert out == expected.result.text
    assert err == ""
    assert program_model == {
        "path": None,
        "dtype": jnp.float32,
        "mesh": None,
        "implementation": None,
        "max_length": None,
        "draft": None,
        "draft_widths": (),
        "draft_weights": "auto",
        "kv_cache_dtype": "auto",
    }


def test_the_prompt_may_come_from_standard_input(program_model, expected, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Input(b"def f("))
    assert decode.main(OPTIONS[2:]) == 0
    assert capsys.readouterr().out == expected.result.text


def test_pieces_are_flushed_as_they_come(program_model, expected, monkeypatch):
    pieces = list(expected)
    events = []

    class Out(io.StringIO):
        def write(self, text):
            events.append(text)
            return len(text)

        def flush(self):
            events.append("flush")

    monkeypatch.setattr(sys, "stdout", Out())
    assert decode.decode(decode.Options(prompt="def f(", max_tokens=12, seed=4)) == 0
    assert events[: 2 * len(pieces)] == [event for piece in pieces for event in (piece, "flush")]


def test_json_is_one_record_with_everything(program_model, expected, capsys):
    assert decode.main([*OPTIONS, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    result = expected.result
    assert record["text"] == result.text
    assert record["ids"] == result.ids
    assert (record["finish_reason"], record["prompt_tokens"]) == ("length", 6)
    assert record["statistics"]["completion_tokens"] == 12
    assert record["statistics"]["weight_bytes"] == expected.statistics.weight_bytes
    assert record["statistics"].keys() >= {"prefill_tokens_per_second", "milliseconds_per_token", "first_token_seconds"}


def test_statistics_go_to_standard_error(program_model, capsys):
    assert decode.main([*OPTIONS, "--stats"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == [
        "prefill",
        "decode",
        "per",
        "first",
        "compilation",
        "weights",
        "state",
    ]
    assert "(6 tokens in" in lines[0]
    assert "ms/token (12 tokens)" in lines[1]


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self):
        return True


@dataclasses.dataclass(frozen=True)
class Prophet(NgramDrafter):
    """Knows the text, so that all its drafts stand."""

    text: tuple[int, ...] = ()

    def propose(self, leaves, context, target, anchor, rows, params, filters=None):
        at = rows.length[:, None] + 1 + jnp.arange(self.block_size, dtype=jnp.int32)[None]
        token = jnp.asarray(self.text, jnp.int32).at[at].get(mode="fill", fill_value=0)
        return Proposal(token, jax.nn.one_hot(token, target.head.shape[0], dtype=jnp.float32))


@pytest.fixture
def drafted_model(monkeypatch, door):
    """The program gets the shared model with a draft that is always right."""
    told = list(k3jax.generate(door, PROMPT, max_tokens=24, temperature=0, as_ids=True, ignore_eos=True))
    prophet = Prophet(block_size=3, text=(*door.tokenizer.encode(PROMPT), *told))
    model = dataclasses.replace(door, draft=Draft(prophet, ()))
    monkeypatch.setattr(api, "load", lambda *args, **options: model)
    return model


PROMPT = "ab ab"
REPEATING = ["--prompt", PROMPT, "--max-tokens", "24", "--temperature", "0", "--draft", "ngram", "--ignore-eos"]


def test_a_draft_is_shown_and_measured(drafted_model, monkeypatch, capsys):
    """On a terminal drafted tokens are green; the figures name the same tokens; elsewhere the text is plain."""
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        assert decode.main([*REPEATING, "--show-draft", "--stats"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["acceptance", "survival", "speed-up"]
    assert " x plain decoding (" in lines[5]
    assert lines[5].endswith("ms/token for 24 tokens)")
    shown = terminal.getvalue()
    assert shown.count(decode.DRAFTED) == shown.count(decode.OWN) > 4
    assert decode.main([*REPEATING, "--show-draft", "--json", "--stats"]) == 0
    record = json.loads(capsys.readouterr().out)
    text = shown.replace(decode.DRAFTED, "").replace(decode.OWN, "")
    assert text == record["text"] + "\n"
    figures = record["statistics"]
    assert figures["accepted"] == [0, 0, 0, 6]
    assert (figures["acceptance_length"], figures["survival"]) == (4, [1, 1, 1])
    assert figures["tokens_per_step"] == round(23 / 6, 3)
    assert record["without_draft"]["tokens_per_step"] == 1
    assert record["speed_up"] > 0
    assert decode.main([*REPEATING, "--show-draft"]) == 0
    assert capsys.readouterr().out == record["text"]


def test_drafted_tokens_are_marked_one_by_one(drafted_model):
    """Of each step three are the draft's and one the model's; the limit cuts the last step after its drafts."""
    stream = k3jax.generate(drafted_model, PROMPT, max_tokens=24, temperature=0, as_ids=True, ignore_eos=True)
    assert [stream.drafted for _ in stream] == [False, *[True, True, True, False] * 5, True, True, True]


def test_every_sampling_flag_reaches_the_sampler(program_model, monkeypatch, door):
    seen, real = {}, api.generate

    def generate(model, prompt, **options):
        seen.update(options, prompt=prompt)
        return real(model, prompt, max_tokens=1)

    monkeypatch.setattr(api, "generate", generate)
    flags = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 9,
        "max_tokens": 3,
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert decode.main([*arguments, "--prompt", "x", "--stop", "a", "b c", "--stop-ids", "3", "--ignore-eos"]) == 0
    wanted = flags | {"prompt": "x", "stop": ("a", "b c"), "stop_ids": (3,), "ignore_eos": True, "as_ids": False}
    assert seen == wanted


def test_ids_in_and_out_without_a_tokenizer(monkeypatch, door, capsys):
    monkeypatch.setattr(api, "load", lambda *args, **kwargs: dataclasses.replace(door, tokenizer=None))
    assert decode.main(["--prompt-ids", "1", "2", "--max-tokens", "3", "--temperature", "0"]) == 0
    wanted = k3jax.generate(door, [1, 2], max_tokens=3, temperature=0, as_ids=True)
    assert capsys.readouterr().out.split() == [str(token) for token in wanted]


def test_chat_renders_the_prompt_and_parses_the_answer(program_model, door, capsys):
    assert decode.main(["--chat", "--prompt", "Hi", "--system", "Be brief.", "--max-tokens", "9", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    from k3jax import chat, parse

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = chat.render(door.tokenizer, messages)
    assert record["prompt_tokens"] == len(ids)
    message = parse.parse(door.tokenizer, record["ids"], finish_reason=record["finish_reason"])
    assert (record["reasoning"], record["content"]) == (message.reasoning, message.content)


@pytest.mark.parametrize("color", [True, False])
def test_the_think_channel_is_dimmed_and_set_apart(door, color):
    from k3jax import chat

    message = {"role": "assistant", "reasoning_content": "hm", "content": "yes"}
    printer = ChannelPrinter(door.tokenizer, thinking=True, color=color)
    ids = chat.render_completion(door.tokenizer, message)
    text = "".join(printer.push(token) for token in ids) + printer.finish("stop")
    assert text == (f"{DIM}hm{PLAIN}\n\nyes" if color else "hm\n\nyes")
    assert (printer.message.reasoning, printer.message.content) == ("hm", "yes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x", "--draft", "no/such/draft"], "error: draft no/such/draft"),
        (["--prompt", "x", "--image", "i.png"], "error: --image is not available: image input"),
        (["--prompt", "x", "--system", "s"], "error: --system needs --chat"),
        (["--prompt", "x", "--chat", "--stop", "s"], "error: --stop does not go with --chat; use --stop-ids"),
        (["--prompt", "x", "--checkpoint", "/nowhere/at/all"], "error: checkpoint /nowhere/at/all does not exist"),
        (["--prompt", "x", "--top-p", "1.5"], "error: top_p is 1.5, expected a value in (0, 1]"),
        (["--prompt", ""], "error: prompt is empty, expected at least one token"),
        (
            ["--prompt-ids", "4", "512"],
            "error: prompt has token id 512 at position 1, expected an integer from 0 to 511",
        ),
        (["--prompt", "x" * 600], "error: prompt has 600 tokens and 1 more, the cache holds at most 600"),
        (["--prompt", "x", "--max-tokens", "0"], "error: max_tokens is 0, expected at least 1"),
        (["--prompt", "x", "--stop", ""], "error: a stop string is empty, expected at least one character"),
        (["--prompt", "x", "--show-draft"], "error: --show-draft needs --draft"),
        (
            ["--prompt", "x", "--draft-weights", "int8"],
            "error: --draft-weights needs the --draft of a directory or auto",
        ),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(program_model, capsys, arguments, message):
    assert decode.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "many"], "error: Error parsing --max-tokens: invalid literal for int()"),
        (["--dtype", "int8"], "error: invalid choice 'int8' for argument '--dtype'"),
        (["--promt", "x"], "error: Unrecognized options: --promt"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        decode.main(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.startswith(message)
    assert err.endswith("see python -m k3jax.decode --help\n")
    assert err.count("\n") == 1


def test_standard_input_that_is_not_utf8(program_model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Input(b"abc\xff\xfe"))
    assert decode.main([]) == 2
    wanted = "error: standard input is not UTF-8 (byte 0xff at offset 3); convert it to UTF-8\n"
    assert capsys.readouterr().err == wanted


def test_a_terminal_without_a_prompt_is_told_so(program_model, capsys, monkeypatch):
    terminal = Input(b"")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert decode.main([]) == 2
    assert capsys.readouterr().err.startswith('error: no prompt; give --prompt "..."')


def test_failures_give_1_and_interruption_130(monkeypatch, capsys):
    def load(error):
        def fail(*args, **kwargs):
            raise error

        monkeypatch.setattr(api, "load", fail)

    load(checkpoints.CheckpointError("x cannot be used", ["a: missing", "b: missing"]))
    assert decode.main(OPTIONS) == program.FAILURE
    assert capsys.readouterr().err.count("\n") == 1
    load(ExceptionGroup("no implementation serves this call", [NotImplementedError("a reason"), ValueError("another")]))
    assert decode.main(OPTIONS) == program.FAILURE
    line = "error: no implementation serves this call (2 sub-exceptions); a reason; another\n"
    assert capsys.readouterr().err == line
    load(KeyboardInterrupt())
    assert decode.main(OPTIONS) == program.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_bad_logits_are_a_failure_that_names_the_position(monkeypatch, door, capsys):
    leaves = tuple(
        leaf * np.float32("nan") if leaf.ndim == 1 and leaf.dtype == jnp.float32 else leaf for leaf in door.leaves
    )
    monkeypatch.setattr(api, "load", lambda *args, **kwargs: dataclasses.replace(door, leaves=leaves))
    assert decode.main(OPTIONS) == 1
    assert "error: row 0: logits for position 6 are not finite" in capsys.readouterr().err


def test_lengths_that_no_model_has_exit_with_2(door_config, random_tree, monkeypatch, capsys):
    tree = random_tree(door_config)
    monkeypatch.setattr(checkpoints, "load", lambda root, config, **options: (door_config, tree))
    for length in ("0", "601"):
        assert decode.main(["--prompt", "x", "--max-length", length]) == 2
        message = f"error: max_length is {length}, expected 1 to 600 (max_position_embeddings)\n"
        assert capsys.readouterr().err == message


def test_unknown_backends_are_named():
    with pytest.raises(ValueError, match="implementation is 'foo', expected mosaic, triton, xla, or None for the best"):
        api._require_backend("foo")  # `load` says this first, unless the tests' own type check is faster


def test_help_is_quick_and_shows_examples():
    start = time.process_time()
    begin = time.perf_counter()
    done = run("--help")
    elapsed = time.perf_counter() - begin
    assert done.returncode == 0
    assert done.stderr == ""
    assert "python -m k3jax.decode --prompt" in done.stdout
    assert "--repetition-penalty" in done.stdout
    assert elapsed < 20, f"{elapsed:.1f} s"  # 0.3 s on an idle machine
    assert time.process_time() - start < 2


def test_help_imports_no_jax():
    code = "import sys; import k3jax.decode, k3jax.verify; print('jax' in sys.modules, 'tyro' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False False\n"


def test_the_whole_program_on_a_checkpoint(door_config, random_tree, byte_directory, tmp_path):
    """A process of its own reads a released-format checkpoint, streams, and prints no warning."""
    import shutil

    from k3jax import params

    specs = params.model_specs(door_config)
    tree = random_tree(door_config)
    flat = dict(params.flatten(specs))

    def cast(subtree, prefix=()):
        return {
            key: cast(value, (*prefix, key))
            if isinstance(value, dict)
            else value.astype(flat[*prefix, key].array_dtype(jnp.bfloat16))
            for key, value in subtree.items()
        }

    checkpoints.export(tmp_path / "model", door_config, cast(tree))
    for file in byte_directory.iterdir():
        shutil.copy(file, tmp_path / "model")
    done = run(
        "--checkpoint", str(tmp_path / "model"), "--prompt", "def", "--max-tokens", "5", "--ignore-eos", "--json"
    )
    assert done.stderr == ""
    assert done.returncode == 0
    record = json.loads(done.stdout)
    assert len(record["ids"]) == 5
    assert record["finish_reason"] == "length"
