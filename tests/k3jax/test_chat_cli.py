"""`python -m k3jax.chat`: render, parse and count."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k3jax import chat
from k3jax.chat.__main__ import main
from k3jax.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hi 漢字 <|sep|>"}]


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"messages": MESSAGES, "thinking_effort": "low"}), encoding="utf-8")
    return path


def out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_render_text_ids_and_segments(
    request_file: Path, small: Tokenizer, small_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segments = chat.render_segments(MESSAGES, thinking_effort="low")
    assert main(["render", str(request_file)]) == 0
    assert out(capsys) == "".join(segment.text for segment in segments) + "\n"
    assert main(["render", str(request_file), "--format", "ids", "--tokenizer", str(small_directory)]) == 0
    assert json.loads(out(capsys)) == chat.render(small, MESSAGES, thinking_effort="low")
    assert main(["render", str(request_file), "--format", "segments"]) == 0
    assert [json.loads(line) for line in out(capsys).splitlines()] == [list(segment) for segment in segments]


def test_colours_mark_control_tokens(request_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(request_file), "--format", "segments", "--color", "always"]) == 0
    coloured = out(capsys)
    assert "\x1b[1;35m<|open|>\x1b[0m" in coloured
    assert "\x1b[1;35m<|sep|>" in coloured
    assert "Hi 漢字 <|sep|>\x1b[0m" in coloured


def test_a_prompt_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = "a\x1b[31m\tb\x00\r\x07\x7f [bold]漢 :smile:\n" + "w" * 300 + "   \n end "
    path = tmp_path / "request.json"
    path.write_text(json.dumps([{"role": "user", "content": content}]))
    assert main(["render", str(path), "--format", "segments", "--color", "always", "--thinking-effort", "none"]) == 0
    coloured = out(capsys)
    shown = "a␛[31m␉b␀␍␇␡ [bold]漢 :smile:\n" + "w" * 300 + "   \n end "
    assert shown in coloured
    plain = re.sub(r"\x1b\[(0|1;35|36|33)m", "", coloured)
    segments = chat.render_segments([{"role": "user", "content": shown}], thinking_effort=None)
    assert plain == "".join(segment.text for segment in segments) + "\n"


def test_flags_override_the_file(request_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, options in (
        (["--thinking-effort", "none"], {"thinking_effort": None}),
        (["--thinking-effort", "file"], {"thinking_effort": "low"}),
        (["--thinking-effort", "high"], {"thinking_effort": "high"}),
        (["--no-thinking"], {"thinking": False}),
    ):
        assert main(["render", str(request_file), *flags]) == 0
        assert out(capsys) == "".join(segment.text for segment in chat.render_segments(MESSAGES, **options)) + "\n"


def test_count(request_file: Path, small: Tokenizer, small_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", str(request_file), "--tokenizer", str(small_directory)]) == 0
    counts = json.loads(out(capsys))
    ids = chat.render(small, MESSAGES, thinking_effort="low")
    assert counts["tokens"] == len(ids) == counts["control"] + counts["ordinary"]
    assert counts["control"] == sum(id_ >= small.base_size for id_ in ids)


def test_parse_text_and_ids(
    tmp_path: Path, small: Tokenizer, small_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "why<|close|>think<|sep|><|open|>response<|sep|>answer<|close|>response<|sep|><|close|>message<|sep|>"
    message = {"reasoning": "why", "content": "answer", "tool_calls": [], "finish_reason": "stop"}
    path = tmp_path / "output"
    path.write_text(text, encoding="utf-8")
    assert main(["parse", str(path)]) == 0
    assert json.loads(out(capsys)) == message
    path.write_text(json.dumps(small.encode(text, allow_special=True)))
    assert main(["parse", str(path), "--tokenizer", str(small_directory)]) == 0
    assert json.loads(out(capsys)) == message
    assert main(["parse", str(path), "--tokenizer", str(small_directory), "--stream"]) == 0
    deltas = [json.loads(line) for line in out(capsys).splitlines()]
    assert "".join(delta["text"] for delta in deltas if delta["kind"] == "content") == "answer"
    path.write_text("answer<|close|>response<|sep|>")
    assert main(["parse", str(path), "--prefilled", "response"]) == 0
    assert json.loads(out(capsys))["content"] == "answer"


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(MESSAGES).encode())))
    assert main(["render", "-"]) == 0
    assert "Hi 漢字" in out(capsys)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert main(["render", "-"]) == 1
    assert capsys.readouterr().err == "error: standard input is not UTF-8: byte 0xff at offset 0\n"
    for data, problem in ((b"{", "is not JSON: "), (b"5", "holds a int"), (b"[" * 100_000, "is nested too deeply")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main(["render", "-"]) == 1
        assert capsys.readouterr().err.startswith(f"error: standard input {problem}")


@pytest.mark.parametrize(
    ("content", "arguments", "code", "message"),
    [
        ("[]", ["--format", "ids"], 2, "--format ids needs --tokenizer"),
        ("{}", [], 1, "holds no messages"),
        ("nonsense", [], 1, "is not JSON"),
        ("5", [], 1, "holds a int"),
        ('{"messages": [], "tool": 1}', [], 1, "unknown key 'tool'"),
        ('[{"role": "user", "content": 5}]', [], 1, "messages[0].content is a int"),
        ("[]", ["--format", "ids", "--tokenizer", "absent"], 1, "no tokenizer at absent"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, arguments: list[str], code: int, message: str
) -> None:
    path = tmp_path / "request.json"
    path.write_text(content)
    assert main(["render", str(path), *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("error: ")


def test_a_missing_file_and_missing_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(tmp_path / "absent.json")]) == 1
    assert "absent.json" in capsys.readouterr().err
    (tmp_path / "ids").write_text("[1, 2]")
    assert main(["parse", str(tmp_path / "ids")]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["render"])
    assert stop.value.code == 2


def test_the_program_runs_as_a_module(request_file: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-m", "k3jax.chat", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(chat.__file__).parents[2])

    shown = run("--help")
    assert shown.returncode == 0
    assert "Examples:" in shown.stdout
    assert "{file,low,high,max,none}" in run("render", "--help").stdout
    rendered = run("render", str(request_file))
    assert (rendered.returncode, rendered.stderr) == (0, "")
    assert rendered.stdout.startswith('<|open|>message role="system" type="thinking-effort"<|sep|>')


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps([{"role": "user", "content": "line\n" * 100_000}]))
    command = [sys.executable, "-W", "error", "-m", "k3jax.chat", "render", str(path)]
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(chat.__file__).parents[2]
    )
    assert program.stdout is not None
    program.stdout.read(10)
    program.stdout.close()
    assert program.stderr is not None
    assert program.stderr.read() == b""
    program.stderr.close()
    assert program.wait(timeout=60) == 0
