"""`python -m k3jax.decode`: streams text from a checkpoint."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from k3jax import program, speedup

if TYPE_CHECKING:
    from k3jax.generation.results import Statistics
    from k3jax.generation.text_stream import Stream
    from k3jax.runtime import Model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Continues a prompt, or answers a question with --chat, and streams the text to standard output.

    Exit codes: 0, 1 for a failure, 2 for a wrong command line or input, 130 for Ctrl-C.

    Examples:
      python -m k3jax.decode --prompt "def fibonacci(n):" --max-tokens 64
      cat module.py | python -m k3jax.decode --temperature 0.7 --top-p 0.95 --seed 1
      python -m k3jax.decode --chat --prompt "What is a radix tree?" --stats
      python -m k3jax.decode --prompt "class Stack:" --draft auto --show-draft --stats
      python -m k3jax.decode --checkpoint path/to/K3 --mesh tp8 --prompt Hello --json
    """

    prompt: str | None = None
    """The text to continue. Default: standard input."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt as token ids, for a checkpoint without a tokenizer."""
    chat: bool = False
    """Treat the prompt as a user's message; the think channel is dimmed on a terminal."""
    system: str | None = None
    """With --chat: a system message."""
    no_thinking: bool = False
    """With --chat: answer without thinking first."""
    checkpoint: Path | None = None
    """Directory or file in the released format, or a saved model. Default: the shipped nano model."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of activations and weights; auto: bfloat16, on a CPU float32."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of cached latents; fp8 (e4m3) halves their memory at some precision. auto: as the activations."""
    mesh: str | None = None
    """Mesh preset, e.g. tp2; default: one device. On GPUs tp2, tp4 and tp8 sum in one hop where a trial at the start
    proves it; tp2-nccl and tp2-one-hop ask for one of both."""
    implementation: Literal["xla", "mosaic", "triton"] | None = None
    """Force one kernel backend. Default: the best for the device."""
    max_length: int | None = None
    """Most tokens of prompt and output together. Default: the model's limit."""
    max_tokens: int = 256
    """Most tokens to sample."""
    temperature: float = 1.0
    """0 always takes the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that have this much probability together."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the most likely one's probability."""
    repetition_penalty: float = 1.0
    """Above 1: makes tokens of the prompt and the output less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    seed: int = 0
    """Same seed, same text."""
    stop: tuple[str, ...] = ()
    """End before one of these strings."""
    stop_ids: tuple[int, ...] = ()
    """End at one of these token ids."""
    ignore_eos: bool = False
    """Go on after an end-of-message or end-of-document token."""
    stats: bool = False
    """Print speed and memory to standard error; with a draft also how it fared, and the speed without it."""
    json: bool = False
    """Print one JSON record instead of streaming."""
    draft: str | None = None
    """Decode speculatively: a DSpark directory, "auto" for NAME-dspark beside the checkpoint, "ngram", or "none"."""
    draft_widths: tuple[int, ...] = ()
    """Let the draft's confidence choose how many tokens a step verifies, e.g. 2 4 8. Default: always all."""
    draft_weights: Literal["auto", "model", "int8"] = "auto"
    """Kind of the draft's matrices: as the model's, or 8 bits. auto: int8 for bfloat16 on a GPU."""
    show_draft: bool = False
    """On a terminal: color the tokens that the draft proposed and the model let stand."""
    image: str | None = None
    """Not available yet."""


DRAFTED, OWN = "\x1b[32m", "\x1b[39m"
"""What --show-draft puts around a drafted token: green, and the color from before."""

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    *tuple(f"{kind}_penalty" for kind in ("repetition", "presence", "frequency")),
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    options = program.parse(Options, "k3jax.decode", arguments)
    return program.run(lambda: decode(options))


def decode(options: Options) -> int:
    """Generates and prints."""
    out = sys.stdout
    _refuse(options)
    text = None if options.prompt_ids else read_text(options)
    with program.status("loading the model"):
        model = load(options)
    printer = None
    prompt: str | list[int] = list(options.prompt_ids) if text is None else text
    if options.chat:
        from k3jax.chat import stream as chat_stream

        if model.tokenizer is None or text is None:
            raise program.UsageError("--chat needs a text and a checkpoint with a tokenizer")
        prompt = chat_stream.render(model.tokenizer, text, options.system, not options.no_thinking)
        color = out.isatty() and not options.json
        printer = chat_stream.ChannelPrinter(model.tokenizer, thinking=not options.no_thinking, color=color)
    stream = start(model, prompt, options)
    mark = options.show_draft and out.isatty()
    for piece in pieces(stream, printer):
        if not options.json:
            out.write(f"{DRAFTED}{piece}{OWN}" if mark and stream.drafted else piece)
            out.flush()
    if out.isatty() and not options.json:
        out.write("\n")
    alone = time_plain(model, prompt, stream, options) if options.stats and model.draft else None
    if options.json:
        out.write(json.dumps(record(stream, printer, alone), ensure_ascii=False) + "\n")
    if options.stats:
        print(table(stream, alone), file=sys.stderr)
    return 0


def _refuse(options: Options) -> None:
    """Names what cannot be used, before anything is loaded."""
    if options.image is not None:
        raise program.UsageError("--image is not available: image input is not implemented yet; leave it out")
    if options.draft not in (None, "auto", "none", "ngram"):
        program.require_path(Path(options.draft), "draft")
    if options.prompt is not None and options.prompt_ids:
        raise program.UsageError("--prompt and --prompt-ids are both given; give one")
    if options.system is not None and not options.chat:
        raise program.UsageError("--system needs --chat")
    if options.chat and options.stop:
        raise program.UsageError("--stop does not go with --chat; use --stop-ids")
    if options.show_draft and options.draft in (None, "none"):
        raise program.UsageError("--show-draft needs --draft")
    if options.draft_weights != "auto" and options.draft in (None, "none", "ngram"):
        raise program.UsageError("--draft-weights needs the --draft of a directory or auto")
    if options.checkpoint is not None:
        program.require_path(options.checkpoint, "checkpoint")


def read_text(options: Options) -> str:
    """The prompt from the command line or standard input.

    Raises `UsageError` when there is none and when standard input is not UTF-8.
    """
    if options.prompt is not None:
        return options.prompt
    if sys.stdin.isatty():
        raise program.UsageError('no prompt; give --prompt "..." or pipe a text to standard input')
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise program.UsageError(
            f"standard input is not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}); convert it to UTF-8"
        ) from error


def load(options: Options) -> "Model":
    """The model of the options."""
    import jax

    from k3jax import api

    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return api.load(
        options.checkpoint,
        dtype=jax.numpy.dtype(dtype),
        mesh=options.mesh,
        implementation=options.implementation,
        max_length=options.max_length,
        draft=options.draft,
        draft_widths=options.draft_widths,
        draft_weights=options.draft_weights,
        kv_cache_dtype=options.kv_cache_dtype,
    )


def start(model: "Model", prompt: str | list[int], options: Options) -> "Stream[Any]":
    """The stream of the options; nothing runs before its first piece is asked for."""
    from k3jax import api

    return api.generate(
        model,
        prompt,
        max_tokens=options.max_tokens,
        stop=options.stop,
        stop_ids=options.stop_ids,
        ignore_eos=options.ignore_eos,
        as_ids=options.chat,
        **_settings(options),
    )


def _settings(options: Options) -> Any:
    """The sampling flags as `generate` takes them."""
    return {name: getattr(options, name) for name in _SAMPLING}


def time_plain(model: "Model", prompt: str | list[int], stream: "Stream[Any]", options: Options) -> "Statistics":
    """The same number of tokens without the draft."""
    with program.status("timing the model without the draft"):
        return speedup.plain(model, prompt, stream.statistics.completion_tokens, **_settings(options))


def pieces(stream: "Stream[Any]", printer: Any) -> "Any":
    """Text as it comes; ids of a model without a tokenizer as numbers."""
    with program.status("compiling and reading the prompt") as waiting:
        for piece in stream:
            waiting.done()
            if printer is not None:
                yield printer.push(piece)
            else:
                yield piece if isinstance(piece, str) else f"{piece} "
    if printer is not None:
        yield printer.finish(stream.result.finish_reason)


def record(stream: "Stream[Any]", printer: Any, alone: "Statistics | None" = None) -> dict[str, Any]:
    """Everything about a finished stream, for --json; `alone` are the figures without the draft."""
    result = stream.result
    fields: dict[str, Any] = {
        "text": result.text,
        "ids": result.ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
    }
    if printer is not None:
        fields |= dataclasses.asdict(printer.message)
    fields["statistics"] = stream.statistics.summary()
    if alone is not None:
        fields |= {"without_draft": alone.summary(), "speed_up": speedup.ratio(stream.statistics, alone)}
    return fields


def table(stream: "Stream[Any]", alone: "Statistics | None" = None) -> str:
    """The figures of --stats; `alone` are those without the draft."""
    figures = stream.statistics
    mebibyte = 1 << 20
    draft = "".join(f"{line}\n" for line in speedup.lines(figures, alone)) if alone is not None else ""
    return (
        f"prefill      {figures.prefill_tokens_per_second:.1f} tokens/s "
        f"({figures.prompt_tokens} tokens in {figures.prefill_seconds:.2f} s)\n"
        f"decode       {figures.milliseconds_per_token:.2f} ms/token ({figures.completion_tokens} tokens)\n"
        f"per step     {figures.tokens_per_step:.2f} tokens, {figures.milliseconds_per_step:.2f} ms\n"
        f"{draft}"
        f"first token  {figures.first_token_seconds:.2f} s, compilation included\n"
        f"compilation  {figures.compile_seconds:.2f} s ({figures.compilations} programs), in neither rate\n"
        f"weights      {figures.weight_bytes / mebibyte:.1f} MiB\n"
        f"state        {figures.cache_bytes / mebibyte:.1f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
