"""The services that load can be put on, by protocol."""

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol, runtime_checkable

from serving.bench.workload import Prompt

PROTOCOLS = ("vllm-grpc", "k3jax.v1", "openai")


class RequestFailed(Exception):
    """A request that ended with an error; its text is the error's name."""


class About(NamedTuple):
    """What a service says of itself."""

    model: str
    vocabulary: int
    """Ids that a prompt may hold are below this one; 0 where prompts are text."""


@runtime_checkable
class Target(Protocol):
    """A connection that many requests share."""

    async def about(self) -> About:
        """Asks the service what it serves. Raises `RequestFailed` or `OSError` when it is not there."""
        ...

    def stream(self, prompt: Prompt, max_tokens: int) -> AsyncIterator[int]:
        """Tokens of each message of an answer that has `max_tokens` tokens. Raises `RequestFailed`."""
        ...

    async def close(self) -> None:
        """Hangs up."""
        ...


def connect(protocol: str, address: str, *, token: str | None = None) -> Target:
    """The target at `address` (host:port, or a URL for `openai`); the modules of other protocols are not imported."""
    if protocol == "vllm-grpc":
        from serving.bench.grpc_targets import WorkerTarget

        return WorkerTarget(address, token)
    if protocol == "k3jax.v1":
        from serving.bench.grpc_targets import NativeTarget

        return NativeTarget(address, token)
    if protocol == "openai":
        from serving.bench.openai_target import OpenAiTarget

        return OpenAiTarget(address, token)
    raise ValueError(f"protocol is {protocol!r}, expected one of {', '.join(PROTOCOLS)}")
