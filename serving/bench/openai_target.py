"""Completions over HTTP, as a gateway serves them: one connection a request, server-sent events."""

import asyncio
import json
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

from serving.bench.target import About, RequestFailed
from serving.bench.workload import Prompt

LINE_LIMIT = 2**20


class OpenAiTarget:
    """`/v1/completions` of a server. A message counts as one token unless the usage says otherwise."""

    def __init__(self, address: str, token: str | None = None) -> None:
        parts = urllib.parse.urlsplit(address if "//" in address else f"http://{address}")
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"address is {address!r}, expected http://host:port; TLS is not spoken here")
        self._host, self._port = parts.hostname, parts.port or 80
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._token = token
        self._model = ""

    async def about(self) -> About:
        """The first model of `/v1/models`."""
        body = b"".join([line async for line in self._ask("GET", "/v1/models", None)])
        models = json.loads(body).get("data") or []
        if not models:
            raise RequestFailed("the server lists no models")
        self._model = models[0]["id"]
        return About(self._model, 0)

    async def stream(self, prompt: Prompt, max_tokens: int) -> AsyncIterator[int]:
        """One completion."""
        body = {
            "model": self._model,
            "prompt": prompt.text,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        said = 0
        async for line in self._ask("POST", "/v1/completions", body):
            event = _event(line)
            if event is None:
                continue
            if event.get("error"):
                raise RequestFailed(str(event["error"].get("message", event["error"])))
            if any(choice.get("text") for choice in event.get("choices", ())):
                said += 1
                yield 1
            # Text is held back until its characters are whole, so messages are fewer than tokens.
            rest = (event.get("usage") or {}).get("completion_tokens", 0) - said
            if rest > 0:
                said += rest
                yield rest

    async def close(self) -> None:
        """Every request has hung up by itself."""

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[bytes]:
        """Lines of the answer's body."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=LINE_LIMIT)
        except OSError as error:
            raise RequestFailed(f"no connection to {self._host}:{self._port}: {error}") from error
        try:
            writer.write(self._request(method, path, body))
            await writer.drain()
            status, chunked = await _head(reader)
            if status != 200:
                raise RequestFailed(f"HTTP {status}")
            async for line in _lines(reader, chunked):
                yield line
        except (OSError, asyncio.IncompleteReadError) as error:
            raise RequestFailed("connection lost") from error
        finally:
            writer.close()

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *([f"Authorization: Bearer {self._token}"] if self._token else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body comes in chunks."""
    words = (await reader.readline()).split()
    if len(words) < 2:
        raise RequestFailed("connection lost")
    chunked = False
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        chunked |= name.lower() == b"transfer-encoding" and b"chunked" in value.lower()
    return int(words[1]), chunked


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        async for line in reader:
            yield line.strip()
        return
    rest = b""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)
        for line in lines:
            yield line.strip()
    if rest:
        yield rest.strip()


def _event(line: bytes) -> dict[str, Any] | None:
    """The JSON of a server-sent event; None for other lines and for the end."""
    if not line.startswith(b"data:") or line == b"data: [DONE]":
        return None
    return json.loads(line.removeprefix(b"data:"))
