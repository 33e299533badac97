"""Services that are waited for: until they are ready, and not when they never will be."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from serving.gateway import processes, workers

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@pytest.fixture
def loading():
    """Address and health of a service that is not ready."""
    server, health = grpc.server(ThreadPoolExecutor(2)), HealthServicer()
    add_HealthServicer_to_server(health, server)
    health.set("", NOT_SERVING)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address, health
    server.stop(0).wait()


def test_a_service_that_still_compiles_is_waited_for(loading, capsys, monkeypatch):
    """It listens before it is ready; what is being waited for is said meanwhile."""
    address, health = loading
    monkeypatch.setattr(workers, "ASK_SECONDS", 0.02)
    monkeypatch.setattr(workers, "REMIND_SECONDS", 0.05)
    ready = threading.Event()
    waiting = threading.Thread(target=lambda: (workers.wait_until_ready(address), ready.set()))
    waiting.start()
    assert not ready.wait(0.3)
    health.set("", SERVING)
    assert ready.wait(10)
    waiting.join()
    said = capsys.readouterr().err.splitlines()
    assert said
    assert all(re.fullmatch(rf"waiting for the service at {address} to load and compile: \d+ s", line) for line in said)


def test_nobody_there_is_said_at_once():
    address = f"127.0.0.1:{processes.free_port()}"
    with pytest.raises(RuntimeError, match=rf"no service listens at {address}; start one with `python -m serving"):
        workers.wait_until_ready(f"grpc://{address}", connect_seconds=0.3)
    workers.wait_until_ready(f"grpcs://{address}")  # is the gateway's to find out


@pytest.mark.parametrize(
    ("code", "ends"), [(grpc.StatusCode.UNAVAILABLE, True), (grpc.StatusCode.UNIMPLEMENTED, False)]
)
def test_a_service_that_ends_meanwhile_is_named_and_one_without_health_is_taken(monkeypatch, code, ends):
    class Failure(grpc.RpcError):
        def code(self):
            return code

    class Stub:
        def __init__(self, channel):
            pass

        def Check(self, request, timeout):
            raise Failure

    monkeypatch.setattr(health_pb2_grpc, "HealthStub", Stub)
    if ends:
        with pytest.raises(RuntimeError, match="the service at here:1 ended before it was ready"):
            workers._wait_for_health(None, "here:1")
    else:
        workers._wait_for_health(None, "here:1")
