"""What a service answers instead of an answer."""

from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Statuses after which the same request may succeed a little later."""


class ServiceError(RuntimeError):
    """A call that ended with a status.

    Attributes:
      code: the gRPC status code.
      message: what the service says.
      field: the field of the request that is wrong, if one is.
      request_id: the request, if it got as far as to have an id.
      retry_after: seconds after which to try again, if the service says so.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        field: str = "",
        request_id: str = "",
        retry_after: int | float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code, self.message, self.field = code, message, field
        self.request_id, self.retry_after = request_id, retry_after

    @property
    def may_retry(self) -> bool:
        """Whether the same request may succeed a little later."""
        says_when = self.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or self.retry_after is not None
        return self.code in RETRIED and says_when

    @classmethod
    def of(cls, error: grpc.RpcError) -> "ServiceError":
        """The status of a failed call with its details."""
        known = {"field": "", "request_id": "", "retry_after": None}
        for detail in _details(error):
            known |= _read(detail)
        return cls(error.code(), error.details() or "", **known)  # pyright: ignore


def _details(error: Any) -> Any:
    """The details of a status; a call that never reached the service has none, nor has one that gRPC itself ended."""
    if error.trailing_metadata() is None:
        return ()
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details of another status than the one that arrived
        return ()
    return () if status is None else status.details


def _read(detail: Any) -> dict[str, Any]:
    bad, retry, request = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo(), error_details_pb2.RequestInfo()
    if detail.Unpack(bad):
        return {"field": bad.field_violations[0].field}
    if detail.Unpack(retry):
        return {"retry_after": retry.retry_delay.ToTimedelta().total_seconds()}
    return {"request_id": request.request_id} if detail.Unpack(request) else {}
