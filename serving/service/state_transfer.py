"""Cached prefixes between servers, in pieces that fit into messages."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from serving import exchange
from serving.exchange import ExchangeError, ExportedPrefix
from serving.protocol import messages
from serving.service.refusals import Refusal, invalid
from serving.service.state import EngineState

PIECE = 1 << 20
"""Bytes per message."""
LARGEST = 64 << 30
"""Bytes of a state that is taken in at all."""


async def take(state: EngineState, tokens: list[int], salt: str) -> Iterator[Any]:
    """The longest reusable prefix of `tokens`, in pieces. Raises NOT_FOUND when there is none."""
    core = state.core
    exported = await state.call(lambda: exchange.export_prefix(core, tokens, salt=salt))
    if exported is None:
        text = f"nothing of this prompt of {len(tokens)} tokens is in the cache"
        raise Refusal(grpc.StatusCode.NOT_FOUND, text)
    return pieces(exported.to_bytes())


def pieces(data: bytes) -> Iterator[Any]:
    """The messages of a state."""
    for start in range(0, len(data), PIECE):
        total = 0 if start else len(data)
        yield messages.StateChunk(total_bytes=total, data=data[start : start + PIECE])


async def put(state: EngineState, chunks: AsyncIterator[Any]) -> Any:
    """Stores a state as a whole or not at all. Raises a `Refusal` that says what does not fit."""
    data = await gather(chunks)
    core = state.core
    try:
        exported = ExportedPrefix.from_bytes(data)
        stored = await state.call(lambda: exchange.import_prefix(core, exported))
    except ExchangeError as error:
        raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
    return messages.ImportStateResponse(tokens=len(exported.tokens), stored=stored)


async def gather(chunks: AsyncIterator[Any]) -> bytes:
    """The bytes of a state. Raises a `Refusal` for more or fewer than announced."""
    data, total = bytearray(), None
    async for chunk in chunks:
        total = chunk.total_bytes if total is None else total
        if not 0 < total <= LARGEST:
            raise invalid("total_bytes", f"is {total} in the first piece, expected 1 to {LARGEST}")
        data += chunk.data
        if len(data) > total:
            raise invalid("data", f"has more than the {total} bytes that were announced")
    if total is None or len(data) != total:
        raise invalid("data", f"has {len(data)} bytes of {total}; the stream ended early")
    return bytes(data)
