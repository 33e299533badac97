"""What an operator relies on: health, drain, failure, access, metrics, logs (checklist 4 to 7 and 15 to 17)."""

import asyncio
import json
import logging
import random
import subprocess
import time
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from smg_grpc_proto import vllm_engine_pb2 as worker

import serving
from serving.protocol import NATIVE, WORKER, services
from serving.service.options import ServiceOptions, Tls
from tests.serving.fake_runner import solo
from tests.serving.service.conftest import make_card
from tests.serving.service.test_generate import tokenized

NAMES = {health_pb2.HealthCheckResponse.SERVING: "SERVING", health_pb2.HealthCheckResponse.NOT_SERVING: "NOT_SERVING"}


def health(running, name=""):
    stub = health_pb2_grpc.HealthStub(running.channel)
    return NAMES[stub.Check(health_pb2.HealthCheckRequest(service=name)).status]


def test_6_ready_only_with_an_engine_but_alive_before(start):
    running = start(card=None)
    assert [health(running, name) for name in ("", NATIVE, WORKER)] == ["NOT_SERVING"] * 3
    assert health(running, "liveness") == "SERVING"
    with pytest.raises(grpc.RpcError) as refused:
        list(running.worker.Generate(tokenized([1])))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(serving.ServiceError, match="being loaded"):
        running.client.model()


def test_6_ready_with_an_engine(ids_only):
    assert [health(ids_only, name) for name in ("", NATIVE, WORKER, "liveness")] == ["SERVING"] * 4
    assert ids_only.client.health() == "SERVING"
    assert ids_only.worker.HealthCheck(worker.HealthCheckRequest()).healthy


def test_4_drain_finishes_all_streams_and_lets_nobody_in(start):
    running = start(seconds=0.001, queue_limit=100)
    running.runner.go_on.clear()
    calls = [running.worker.Generate(tokenized([n % 40, 3], max_tokens=30, ignore_eos=True)) for n in range(50)]
    while len(running.service.jobs) < 50:
        time.sleep(0.001)
    start_time = time.monotonic()
    draining = asyncio.run_coroutine_threadsafe(running.service.drain(20, asyncio.Event()), running.loop)
    while health(running) == "SERVING":
        pass
    assert time.monotonic() - start_time < 0.05
    with pytest.raises(serving.ServiceError, match="shutting down") as refused:
        list(running.client.generate([1]))
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    running.runner.go_on.set()
    for n, call in enumerate(calls):
        *_, last = call
        assert list(last.complete.output_ids) == solo([n % 40, 3], 30)
    assert draining.result(20) is True


def test_4_a_hurried_drain_gives_every_client_a_status(start):
    running = start()
    # However slow the machine is, nobody is done before the engine stands still; some wait for it, some have tokens.
    running.runner.pause_at = 5
    calls = [running.worker.Generate(tokenized([n, 3], max_tokens=390, ignore_eos=True)) for n in range(6)]
    while running.service.jobs.accepted < 6 or running.runner.dispatched < 5:
        time.sleep(0.001)

    async def drain():
        hurry = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, hurry.set)
        return await running.service.drain(20, hurry)

    assert running.do(drain()) is False
    for call in calls:
        with pytest.raises(grpc.RpcError, match="shutting down") as ended:
            list(call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 100))])
def test_4_a_hurry_at_any_moment_leaves_nobody_without_an_end(start, seed):
    """Calls on their way in, in the queue, between two tokens and just done: each has its whole answer or a status."""
    rng = random.Random(seed)
    running = start(seconds=0.001, queue_limit=100)
    sizes = [rng.randrange(1, 60) for _ in range(12)]
    calls = [
        running.worker.Generate(tokenized([n, 3], max_tokens=size, ignore_eos=True)) for n, size in enumerate(sizes)
    ]
    time.sleep(rng.uniform(0, 0.03))

    async def drain():
        hurry = asyncio.Event()
        asyncio.get_running_loop().call_later(rng.uniform(0, 0.03), hurry.set)
        await running.service.drain(20, hurry)
        await running.service.stop()

    running.do(drain())
    ends = set()
    for n, (call, size) in enumerate(zip(calls, sizes, strict=True)):
        try:
            *_, last = call
        except grpc.RpcError as error:
            ends.add(error.code())
        else:
            assert list(last.complete.output_ids) == solo([n, 3], size)
    assert ends <= {grpc.StatusCode.UNAVAILABLE}


def test_7_a_crash_gives_every_stream_internal_with_its_id(start):
    running = start(seconds=0.005)
    running.runner.go_on.clear()
    calls = [
        running.worker.Generate(tokenized([n], max_tokens=390, request_id=f"r{n}", ignore_eos=True)) for n in range(6)
    ]
    while len(running.service.jobs) < 6:
        time.sleep(0.001)
    start_time = time.monotonic()
    running.runner.collect = None
    running.runner.go_on.set()
    for n, call in enumerate(calls):
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        error = serving.ServiceError.of(ended.value)
        assert (error.code, error.request_id) == (grpc.StatusCode.INTERNAL, f"r{n}")
    assert time.monotonic() - start_time < 1
    running.do(asyncio.wait_for(running.service.failed.wait(), 2))
    assert health(running) == health(running, "liveness") == "NOT_SERVING"


def test_6_a_wedged_engine_is_noticed(start):
    running = start(stall_seconds=0.8)
    running.runner.pause_at = 3
    call = running.worker.Generate(tokenized([1], max_tokens=390, request_id="stuck", ignore_eos=True))
    next(call)
    waiting = running.worker.Generate(tokenized([2], request_id="late"))
    start_time = time.monotonic()
    while health(running) == "SERVING":
        time.sleep(0.01)
    assert time.monotonic() - start_time < 1.0
    for stuck, name in ((call, "stuck"), (waiting, "late")):
        with pytest.raises(grpc.RpcError, match="no sign of life") as ended:
            list(stuck)
        assert serving.ServiceError.of(ended.value).request_id == name
    running.do(asyncio.wait_for(running.service.failed.wait(), 2))
    running.runner.go_on.set()


def test_5_pings_and_connection_age_are_settings():
    arguments = dict(ServiceOptions(max_connection_age_seconds=60).channel_arguments())
    assert arguments["grpc.http2.min_recv_ping_interval_without_data_ms"] <= 10_000
    assert arguments["grpc.keepalive_time_ms"] + arguments["grpc.keepalive_timeout_ms"] <= 30_000
    assert arguments["grpc.max_connection_age_ms"] == 60_000
    assert arguments["grpc.max_connection_age_grace_ms"] > 0


def test_5_a_client_that_pings_through_a_long_wait_is_kept(start):
    running = start(seconds=0.001, stall_seconds=60, min_ping_seconds=0.05)
    arguments = (
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    with serving.Client(running.address, retries=0) as client:
        client._channel = grpc.insecure_channel(running.address, arguments)
        client._stub = services.GenerateStub(client._channel)
        running.runner.go_on.clear()
        stream = client.generate([1, 2], max_tokens=3, ignore_eos=True)
        time.sleep(1.5)
        running.runner.go_on.set()
        assert stream.result.usage["completion_tokens"] == 3


def test_17_tokens_open_the_door_and_health_needs_none(start):
    running = start(tokens=("secret", "other"))
    assert health(running) == "SERVING"
    for token in (None, "wrong", "secre"):
        with (
            serving.Client(running.address, token=token, retries=0) as client,
            pytest.raises(serving.ServiceError, match="valid token") as refused,
        ):
            list(client.generate([1]))
        assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
    for token in ("secret", "other"):
        with serving.Client(running.address, token=token) as client:
            assert client.generate([1], max_tokens=2, ignore_eos=True).result.usage["completion_tokens"] == 2


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out cert.pem"
    )
    try:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return folder / "cert.pem", folder / "key.pem"


def test_17_mutual_tls(start, certificates):
    certificate, key = certificates
    running = start(tls=Tls(certificate=certificate, key=key, client_ca=certificate))
    address = f"localhost:{running.service.port}"
    with serving.Client(address, ca=certificate, certificate=certificate, key=key) as client:
        assert client.health() == "SERVING"
        assert client.generate([1], max_tokens=2, ignore_eos=True).result.usage["completion_tokens"] == 2
    for options in ({"ca": certificate}, {}):
        with serving.Client(address, timeout=3, retries=0, **options) as client, pytest.raises(serving.ServiceError):
            client.model()


def test_17_messages_have_a_limit(start):
    running = start(message_bytes=1000)
    with pytest.raises(grpc.RpcError) as refused:
        list(running.worker.Generate(tokenized([1] * 2000)))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_reflection_describes_both_protocols(ids_only):
    database = ProtoReflectionDescriptorDatabase(ids_only.channel)
    assert {NATIVE, WORKER, "grpc.health.v1.Health"} <= set(database.get_services())
    assert "GenerateRequest" in [m.name for m in database.FindFileContainingSymbol(NATIVE).message_type]


def test_16_metrics_tell_everything_within_50_ms(start):
    running = start()
    port, stop = running.service.metrics.serve("127.0.0.1", 0)
    list(running.client.generate([1, 2, 3], max_tokens=5, ignore_eos=True))
    with pytest.raises(serving.ServiceError):
        list(running.client.generate([]))

    def scrape():
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()

    text = scrape()
    busy = [running.worker.Generate(tokenized([n], max_tokens=390, ignore_eos=True)) for n in range(6)]
    next(busy[0])
    times = []
    for _ in range(5):
        start_time = time.monotonic()
        scrape()
        times.append(time.monotonic() - start_time)
    assert sorted(times)[2] < 0.05
    for call in busy:
        call.cancel()
    stop()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["k3jax_first_token_seconds_count"]) >= 1
    assert float(values["k3jax_inter_token_seconds_count"]) >= 1
    assert float(values['k3jax_calls_total{ending="length"}']) == 1
    assert float(values['k3jax_calls_total{ending="invalid_argument"}']) == 1
    assert float(values["k3jax_slots_capacity"]) == 23
    assert float(values["k3jax_engine_output_tokens_total"]) >= 5
    assert float(values["k3jax_engine_compilations_total"]) == 0
    for name in ("queue", "step", "call"):
        assert float(values[f"k3jax_{name}_seconds_count"]) >= 1


def test_16_a_tally_tells_what_a_histogram_of_prometheus_would():
    from prometheus_client import CollectorRegistry, Histogram

    from serving.service.tally import Tally

    borders, values = (0.001, 0.5, 2), (0.0, 0.001, 0.0011, 0.5, 1.9, 2.0, 2.1, 100.0)
    tally, real = Tally("x_seconds", "X.", borders), Histogram("x_seconds", "X.", buckets=borders, registry=None)
    for value in values:
        tally.observe(value)
        real.observe(value)
    families = [next(iter(collector.collect())) for collector in (tally, real)]
    ours, theirs = ({(s.name, s.labels.get("le")): s.value for s in family.samples} for family in families)
    assert ours == {key: value for key, value in theirs.items() if not key[0].endswith("_created")}
    registry = CollectorRegistry()
    registry.register(tally)
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("x_seconds", "X.", registry=registry)


def test_the_dashboard_asks_for_metrics_that_exist(ids_only):
    import re
    from pathlib import Path

    import serving.service as package

    text = (Path(package.__path__[0]).parent / "dashboards" / "k3jax.json").read_text()
    asked = set(re.findall(r"k3jax_\w+", " ".join(find(json.loads(text), "expr"))))
    families = list(ids_only.service.metrics.registry.collect())
    suffixes = ("", "_total", "_bucket", "_count", "_sum")
    assert asked
    assert asked <= {family.name + suffix for family in families for suffix in suffixes}


def find(value, key):
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value[key]] if isinstance(value, dict) and key in value else []
    return own + [text for item in items for text in find(item, key)]


def test_16_logs_have_ids_and_no_text(with_text, caplog):
    from serving.service.request_log import LOGGER, JsonLines

    LOGGER.setLevel(logging.INFO)
    with caplog.at_level(logging.INFO, "k3jax.serving"):
        list(with_text.client.generate("a secret word", max_tokens=3, request_id="logged"))
        with_text.books_balance()
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    (line,) = [line for line in lines if line.get("request_id") == "logged"]
    assert line["event"] == "request"
    assert line["completion_tokens"] == 3
    assert "secret" not in json.dumps(lines)


def test_16_a_span_tells_of_its_call_and_belongs_to_the_callers(start, monkeypatch):
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra `tracing`")
    import types

    from opentelemetry import propagate, trace
    from opentelemetry.sdk.trace import export
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from serving.service import tracing

    spans, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(spans))
    api = propagate, types.SimpleNamespace(get_tracer=provider.get_tracer, SpanKind=trace.SpanKind)
    monkeypatch.setattr(tracing, "_api", lambda: api)
    running = start(bad=(13,))
    parent = (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)
    request = tokenized([1, 2, 3], max_tokens=5, ignore_eos=True, request_id="traced")
    list(running.worker.Generate(request, metadata=parent))
    with pytest.raises(grpc.RpcError):
        list(running.worker.Generate(tokenized([1, 13, 2], request_id="nan")))
    running.books_balance()
    good, bad = spans.get_finished_spans()
    assert (good.context.trace_id, good.parent.span_id) == (int("a" * 32, 16), int("b" * 16, 16))
    assert good.attributes["k3jax.request_id"] == "traced"
    assert good.attributes["k3jax.ending"] == "length"
    assert (good.attributes["gen_ai.usage.input_tokens"], good.attributes["gen_ai.usage.output_tokens"]) == (3, 5)
    assert (bad.attributes["k3jax.request_id"], bad.attributes["k3jax.ending"]) == ("nan", "internal")


def test_bugs_are_internal_with_an_id(start, monkeypatch):
    running = start()
    monkeypatch.setattr(running.service.jobs, "enter", lambda *args: 1 / 0)
    with pytest.raises(serving.ServiceError, match="ZeroDivisionError") as failed:
        list(running.client.generate([1], request_id="bug"))
    assert (failed.value.code, failed.value.request_id) == (grpc.StatusCode.INTERNAL, "bug")


def test_15_clients_retry_only_what_nobody_has_heard(start):
    running = start(seconds=0.003, queue_limit=1)
    calls = [running.worker.Generate(tokenized([n], max_tokens=60, ignore_eos=True)) for n in range(5)]
    next(calls[0])
    with serving.Client(running.address, retries=5) as client:
        assert client.generate([9], max_tokens=3, ignore_eos=True).result.usage["completion_tokens"] == 3
    for call in calls:
        list(call)
    with serving.Client(running.address, retries=5) as client:
        stream = client.generate([9], max_tokens=390, ignore_eos=True, request_id="twice")
        next(stream)
        running.in_engine(lambda: setattr(running.runner, "collect", None))
        with pytest.raises(serving.ServiceError) as failed:
            list(stream)
    assert failed.value.code is grpc.StatusCode.INTERNAL


def test_the_card_reads_the_checkpoint(nano_tokenizer):
    assert make_card(nano_tokenizer).vocab_size == 4096
