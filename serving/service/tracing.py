"""A span per call when OpenTelemetry is installed (extra `tracing`) and set up; otherwise nothing."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from serving.service.refusals import Context


@functools.cache
def _api() -> Any:
    try:
        from opentelemetry import propagate, trace  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return propagate, trace


class Span:
    """What a call tells of itself."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def end(self, ending: str, completion_tokens: int) -> None:
        """Notes how the call ended; the span closes with its block."""
        if self._span is not None:
            self._span.set_attribute("k3jax.ending", ending)
            self._span.set_attribute("gen_ai.usage.output_tokens", completion_tokens)


@contextlib.contextmanager
def span(context: Context, request_id: str, protocol: str, prompt_tokens: int) -> Iterator[Span]:
    """A span for the block, a child of the one in the caller's metadata (W3C `traceparent`)."""
    api = _api()
    if api is None:
        yield Span()
        return
    propagate, trace = api
    parent = propagate.extract({key: value for key, value in context.invocation_metadata() or () if key.islower()})
    attributes = {
        "rpc.system": "grpc",
        "rpc.service": protocol,
        "k3jax.request_id": request_id,
        "gen_ai.usage.input_tokens": prompt_tokens,
    }
    tracer = trace.get_tracer("k3jax.serving")
    opened = tracer.start_span("generate", context=parent, kind=trace.SpanKind.SERVER, attributes=attributes)
    try:
        # Not made current: an asynchronous generator may be left in another context than it was entered in.
        yield Span(opened)
    finally:
        opened.end()


def set_up(endpoint: str, service_name: str = "k3jax") -> None:
    """Sends spans to an OTLP collector at `endpoint`. Raises `RuntimeError` when the extra is not installed."""
    try:
        from opentelemetry import trace  # pyright: ignore[reportMissingImports]
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RuntimeError(f"--otlp-endpoint needs OpenTelemetry ({error}); install k3jax[tracing]") from error
    provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https")))
    )
    trace.set_tracer_provider(provider)
