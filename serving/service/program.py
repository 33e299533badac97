"""The program: flags, loading, and the life of the server process."""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from k3jax import program

if TYPE_CHECKING:
    from serving.launch import Sizes
    from serving.service.options import ServiceOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Serves a checkpoint over gRPC: vllm.grpc.engine.VllmEngine for gateways, k3jax.v1.Generate, health, reflection.

    One line `ready host:port` on standard output says that health has turned SERVING; the log goes to standard error.
    SIGTERM drains (a second one aborts what is left). Exit codes: 0 after a complete drain, 1 for a failure or a drain
    that had to abort calls, 2 for a wrong command line, 70 when the engine crashed, 75 when it stood still.

    Examples:
      python -m serving
      python -m serving --checkpoint path/to/K3 --host 0.0.0.0 --port 50051 --tls-certificate c.pem --tls-key k.pem
      python -m serving --max-num-seqs 16 --retention prompt,interval=4096,marconi --eviction lru --metrics-port 9090
    """

    checkpoint: Path | None = None
    """Directory in the released format, or a saved model; without a tokenizer in it, token ids are served. Default:
    the shipped nano model."""
    draft: str = "none"
    """Decode speculatively: a DSpark directory, "auto" for NAME-dspark beside the checkpoint, "ngram", or
    "none"."""
    draft_weights: Literal["auto", "model", "int8"] = "auto"
    """Kind of the draft's matrices: as the model's, or 8 bits. auto: int8 for bfloat16 on a GPU."""
    host: str = "127.0.0.1"
    """Address to listen on; loopback unless you say otherwise."""
    port: int = 50051
    """0 takes a free one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of activations and weights; auto: bfloat16, on a CPU float32."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of cached latents; fp8 (e4m3) halves their memory at some precision. auto: as the activations."""
    mesh: str | None = None
    """Mesh preset, e.g. tp8; default: one device. On GPUs tp2, tp4 and tp8 sum in one hop where a trial at the start
    proves it; tp8-nccl and tp8-one-hop ask for one of both."""
    served_model_name: str | None = None
    """What clients are told; default: the directory's name."""

    max_num_seqs: int = 8
    """Sequences that run at a time."""
    max_length: int | None = None
    """Most tokens of prompt and output together. Default: the model's limit."""
    max_prefill_tokens: int = 512
    """Prompt tokens computed in one step."""
    prefix_cache: Literal["on", "off"] = "on"
    """Reuse states and latents of prompts that start alike."""
    prefix_match_unit: int = 64
    """Tokens in which prefixes are compared."""
    retention: str = "prompt,marconi,decode-end,supersede"
    """Which states are kept: any of prompt, interval=N, marconi, decode-end, supersede."""
    eviction: str = "flop"
    """What goes first when memory is short: flop (by what a hit saves; flop=ALPHA for a fixed weight) or lru."""
    state_slots: int | None = None
    """KDA states in memory. Default: four per sequence."""
    pages: int | None = None
    """Pages of latents in memory. Default: enough for every sequence at full length."""
    page_size: int = 64
    """Tokens of a page."""
    cache_gib: int | float | None = None
    """Memory for states and pages together, where their numbers are not given."""

    queue_limit: int = 256
    """Sequences that may wait; more are refused with RESOURCE_EXHAUSTED."""
    queue_tokens: int = 4 * 2**20
    """Prompt tokens that may wait."""
    max_message_mib: int = 64
    """Largest message that is received."""
    drain_seconds: int | float = 30.0
    """For calls to end after SIGTERM."""
    stall_seconds: int | float = 60.0
    """An engine that shows no sign of life for so long ends the process."""
    max_connection_age_seconds: int | float = 0.0
    """Connections are renewed after so long, for rebalancing; 0: never."""
    keepalive_seconds: int | float = 20.0
    """Idle connections are pinged so often."""

    tls_certificate: Path | None = None
    """PEM; with --tls-key, connections are encrypted."""
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """PEM; clients must show a certificate that it signed."""
    token_file: Path | None = None
    """One bearer token a line; calls without one of them are refused."""
    reflection: Literal["auto", "on", "off"] = "auto"
    """Describe the services to tools such as grpcurl; auto: on without TLS."""
    metrics_port: int = 0
    """Prometheus metrics over HTTP on the same host; 0: none."""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector for traces (extra `tracing`)."""
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


COUNTS = (
    *("max_num_seqs", "max_length", "max_prefill_tokens", "prefix_match_unit", "page_size", "state_slots", "pages"),
    *("queue_limit", "queue_tokens", "max_message_mib"),
)
RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (COUNTS, lambda value: value >= 1, "at least 1"),
    (("drain_seconds", "stall_seconds", "keepalive_seconds", "cache_gib"), lambda value: value > 0, "more than 0"),
    (("max_connection_age_seconds",), lambda value: value >= 0, "at least 0"),
    (("port", "metrics_port"), lambda value: 0 <= value < 2**16, "0 to 65535"),
)
"""Flags with numbers, what they may be, and that in words."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    flags = program.parse(Flags, "serving", arguments)
    return program.run(lambda: serve(flags))


def serve(flags: Flags) -> int:
    """Serves until a signal comes or the engine fails."""
    # A taken port would be told twice, by gRPC's own log too, which must be silenced before it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from serving.service import event_loop, lifecycle, request_log, tracing

    request_log.set_up(flags.log_format, flags.log_level)
    check_numbers(flags)
    if flags.checkpoint is not None:
        program.require_path(flags.checkpoint, "checkpoint")
    if flags.draft not in ("none", "auto", "ngram"):
        program.require_path(Path(flags.draft), "draft")
    options, sizes = service_options(flags), engine_sizes(flags)
    if flags.otlp_endpoint is not None:
        tracing.set_up(flags.otlp_endpoint)
    loading = lifecycle.Loading(
        checkpoint=flags.checkpoint,
        draft=None if flags.draft == "none" else flags.draft,
        dtype=flags.dtype,
        kv_cache_dtype=flags.kv_cache_dtype,
        mesh=flags.mesh,
        name=flags.served_model_name,
        sizes=sizes,
        draft_weights=flags.draft_weights,
    )
    return event_loop.run(lifecycle.run(options, loading, flags.metrics_port))


def check_numbers(flags: Flags) -> None:
    """Raises `UsageError` for the first number that is out of its range."""
    for names, fits, expected in RANGES:
        for name in names:
            value = getattr(flags, name)
            if value is not None and not fits(value):
                raise program.UsageError(f"--{name.replace('_', '-')} is {value:g}, expected {expected}")


def engine_sizes(flags: Flags) -> "Sizes":
    """The engine's settings. Raises `UsageError`."""
    from serving.alpha import fixed_alpha
    from serving.launch import Sizes
    from serving.retention import Retention, RetentionError

    try:
        Retention.parse(flags.retention).check(flags.prefix_match_unit)
    except RetentionError as error:
        raise program.UsageError(f"--retention: {error}") from error
    try:
        fixed_alpha(flags.eviction)
    except ValueError as error:
        raise program.UsageError(f"--{error}") from error
    return Sizes(
        rows=flags.max_num_seqs,
        max_length=flags.max_length,
        step_tokens=max(flags.max_prefill_tokens, 2),
        pages=flags.pages,
        slots=flags.state_slots,
        cache_gib=flags.cache_gib,
        page_size=flags.page_size,
        prefix_match_unit=flags.prefix_match_unit,
        retention=flags.retention,
        eviction=flags.eviction,
        prefix_caching=flags.prefix_cache == "on",
    )


def service_options(flags: Flags) -> "ServiceOptions":
    """The service's settings. Raises `UsageError` for what does not fit together."""
    from serving.service.options import ServiceOptions, Tls

    if (flags.tls_certificate is None) != (flags.tls_key is None):
        raise program.UsageError("--tls-certificate and --tls-key go together; give both or neither")
    if flags.tls_client_ca is not None and flags.tls_key is None:
        raise program.UsageError("--tls-client-ca needs --tls-certificate and --tls-key")
    tls = None
    if flags.tls_certificate is not None and flags.tls_key is not None:
        for path in (flags.tls_certificate, flags.tls_key, flags.tls_client_ca):
            if path is not None:
                program.require_path(path, "file")
        tls = Tls(certificate=flags.tls_certificate, key=flags.tls_key, client_ca=flags.tls_client_ca)
    return ServiceOptions(
        host=flags.host,
        port=flags.port,
        rows=flags.max_num_seqs,
        queue_limit=flags.queue_limit,
        queue_tokens=flags.queue_tokens,
        message_bytes=flags.max_message_mib * 2**20,
        drain_seconds=flags.drain_seconds,
        stall_seconds=flags.stall_seconds,
        keepalive_seconds=flags.keepalive_seconds,
        max_connection_age_seconds=flags.max_connection_age_seconds,
        tls=tls,
        tokens=read_tokens(flags.token_file),
        reflection=flags.reflection == "on" or (flags.reflection == "auto" and tls is None),
    )


def read_tokens(path: Path | None) -> tuple[str, ...]:
    """The tokens of a file, one a line. Raises `UsageError` for a file without any."""
    if path is None:
        return ()
    program.require_path(path, "token file")
    tokens = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not tokens:
        raise program.UsageError(f"token file {path} holds no token; give one a line")
    return tokens


if __name__ == "__main__":
    sys.exit(main())
