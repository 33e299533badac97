"""Services that somebody else has started, and patience with those that are not ready yet."""

import sys
import time
from typing import Any

REMIND_SECONDS = 15.0
"""How often somebody who waits is told for what."""
CONNECT_SECONDS = 20.0
"""For a service that is being started beside the gateway to listen."""
ASK_SECONDS = 0.5


class Reminder:
    """Says from time to time, on standard error, what is being waited for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = self._said = time.monotonic()

    def tell(self) -> None:
        """Call it as often as you like."""
        now = time.monotonic()
        if now - self._said >= REMIND_SECONDS:
            self._said = now
            print(f"waiting for {self._what}: {now - self._start:.0f} s", file=sys.stderr, flush=True)


def wait_until_ready(worker: str, connect_seconds: int | float = CONNECT_SECONDS) -> None:
    """Waits until a service is ready, however long it loads and compiles. `worker`: host:port or grpc://host:port.

    Workers with other URLs, such as grpcs://, and those that do not tell their health are left to the gateway. Raises
    `RuntimeError` when nobody listens there, or when the service ends while it is waited for.
    """
    import grpc

    scheme, _, address = worker.rpartition("://")
    if scheme not in ("", "grpc"):
        return
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(connect_seconds)
        except grpc.FutureTimeoutError as error:
            raise RuntimeError(
                f"no service listens at {address}; start one with `python -m serving --port PORT`, give grpcs:// if it "
                "speaks TLS, or leave out --worker"
            ) from error
        _wait_for_health(channel, address)


def _wait_for_health(channel: Any, address: str) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub: Any = health_pb2_grpc.HealthStub(channel)
    reminder = Reminder(f"the service at {address} to load and compile")
    try:
        while stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status != health_pb2.HealthCheckResponse.SERVING:
            reminder.tell()
            time.sleep(ASK_SECONDS)
    except grpc.RpcError as error:
        code: Any = error.code()  # pyright: ignore[reportAttributeAccessIssue]
        if code is grpc.StatusCode.UNAVAILABLE:
            raise RuntimeError(f"the service at {address} ended before it was ready; its messages say why") from error
        # Whoever does not tell, or not without a token, is the gateway's to judge.
