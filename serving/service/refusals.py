"""Refusals: gRPC statuses whose details name the field, the wait or the request."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc_status import rpc_status

from serving.service.request_log import LOGGER

LONGEST_TEXT = 600
"""Characters of a status."""

Context = Any
"""A `grpc.aio.ServicerContext`; gRPC's own object does not derive from that class."""


class Refusal(Exception):
    """A request ends with a status."""

    def __init__(self, code: StatusCode, text: str, *details: message.Message) -> None:
        super().__init__(text)
        self.code, self.text, self.details = code, text, details


def invalid(field: str, problem: str) -> Refusal:
    """INVALID_ARGUMENT that names the field."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=problem)
    detail = error_details_pb2.BadRequest(field_violations=[violation])
    return Refusal(StatusCode.INVALID_ARGUMENT, f"{field}: {problem}", detail)


def busy(text: str, seconds: int | float) -> Refusal:
    """RESOURCE_EXHAUSTED that says when to come back."""
    wait = duration_pb2.Duration()
    wait.FromNanoseconds(int(seconds * 1e9))
    return Refusal(StatusCode.RESOURCE_EXHAUSTED, text, error_details_pb2.RetryInfo(retry_delay=wait))


def unsupported(field: str, problem: str) -> Refusal:
    """UNIMPLEMENTED that names the field."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=problem)
    detail = error_details_pb2.BadRequest(field_violations=[violation])
    return Refusal(StatusCode.UNIMPLEMENTED, f"{field}: {problem}", detail)


def unavailable(text: str) -> Refusal:
    """UNAVAILABLE: another server, or this one a little later, can do it."""
    return Refusal(StatusCode.UNAVAILABLE, text)


async def abort(context: Context, refusal: Refusal, request_id: str = "") -> None:
    """Ends the call with the refusal's status; always raises."""
    # A status travels as headers, which clients take only so many bytes of.
    details, text, id = list(map(_shortened, refusal.details)), cut(refusal.text), cut(request_id)
    if id:
        details.append(error_details_pb2.RequestInfo(request_id=id))
        text = text if id in text else f"request {id}: {text}"
    status = status_pb2.Status(code=refusal.code.value[0], message=text, details=map(_packed, details))
    await context.abort(refusal.code, text, rpc_status.to_status(status).trailing_metadata)


def refusal_in(error: asyncio.CancelledError) -> Refusal | None:
    """Why the service itself called off a call that was waiting to enter; None when the client hung up."""
    reason = error.args[0] if error.args else None
    return reason if isinstance(reason, Refusal) else None


def answering(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A servicer's method whose refusals become statuses, and whose bugs become INTERNAL, each with the request id."""

    @functools.wraps(method)
    async def answer(servicer: Any, request: Any, context: Context) -> Any:
        id = getattr(request, "request_id", "")
        try:
            return await method(servicer, request, context)
        except Refusal as refusal:
            return await abort(context, refusal, id)
        except asyncio.CancelledError as error:
            refusal = refusal_in(error)
            task = asyncio.current_task()
            if refusal is None or task is None:
                raise
            task.uncancel()
            return await abort(context, refusal, id)
        except grpc.aio.BaseError:
            raise  # there is a status already, or the client has gone; gRPC knows
        except Exception as error:
            LOGGER.exception("bug", extra={"fields": {"request_id": id, "method": method.__name__}})
            text = f"the service failed ({type(error).__name__}); its log has the request id"
            return await abort(context, Refusal(StatusCode.INTERNAL, text), id)

    return answer


def cut(text: str) -> str:
    """The text, without its middle if it is long."""
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 100]} ... {text[-80:]}"


def _shortened(detail: message.Message) -> message.Message:
    if isinstance(detail, error_details_pb2.BadRequest):
        for violation in detail.field_violations:
            violation.description = cut(violation.description)
    return detail


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
