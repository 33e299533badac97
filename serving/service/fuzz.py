"""Mutated requests against a service: none may crash it, and each refusal must name what is wrong.

python -m serving.service.fuzz --requests 100000
"""

import collections
import dataclasses
import itertools
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc import StatusCode

from k3jax import program
from serving.client.errors import ServiceError
from serving.protocol import messages, services
from serving.service.own_server import server_at

REFUSALS = (StatusCode.INVALID_ARGUMENT, StatusCode.UNIMPLEMENTED, StatusCode.RESOURCE_EXHAUSTED)
"""What a bad request may be answered with."""
ENDINGS = (*REFUSALS, StatusCode.OK, StatusCode.DEADLINE_EXCEEDED, StatusCode.CANCELLED)
NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**32 - 1, 0.5, -0.5, 1e-9, 1e30, float("nan"), float("inf"))
TEXTS = ("", "a", "\0", "é", "<|open|>", "}{", "(", "x" * 5000, '{"type": "object"}', "user", "required", "\U0001f642")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Sends mutated requests of both protocols to a service; exit code 1 if any was answered as none should be.

    Examples:
      python -m serving.service.fuzz --requests 100000
      python -m serving.service.fuzz --target 127.0.0.1:50051
    """

    target: str | None = None
    """host:port of a service that nobody else needs. Default: one of the shipped model is started."""
    requests: int = 10_000
    clients: int = 4
    """Requests at a time."""
    seed: int = 0


class Fuzzer:
    """Draws messages field by field, mostly plausible, now and then absurd; all follow from the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def request(self, kind: Any) -> Any:
        """A message of `kind`, limited to what a server can answer soon."""
        message = kind()
        self._fill(message, 0)
        return message

    def _fill(self, message: Any, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if depth < 5 and self._random.random() < (0.5 if depth else 0.35):
                self._set(message, field, depth)

    def _set(self, message: Any, field: Any, depth: int) -> None:
        target = getattr(message, field.name)
        try:
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                target.update({self._number(int): self._number(float) for _ in range(self._random.randrange(4))})
            elif field.is_repeated:
                self._extend(target, field, depth)
            elif field.message_type is not None:
                target.SetInParent()
                self._fill(target, depth + 1)
            else:
                setattr(message, field.name, self._value(field))
        except (ValueError, TypeError):
            return  # the client's own library has refused it

    def _extend(self, target: Any, field: Any, depth: int) -> None:
        count = self._random.choice((0, 1, 1, 2, 3, 9))
        for _ in range(count):
            if field.message_type is not None:
                self._fill(target.add(), depth + 1)
            else:
                target.append(self._value(field))

    def _value(self, field: Any) -> Any:
        kinds = {field.CPPTYPE_STRING: self._text, field.CPPTYPE_BOOL: lambda: self._random.random() < 0.5}
        if field.type == field.TYPE_BYTES:
            return self._text().encode()
        floats = (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE)
        number: Callable[[], Any] = lambda: self._number(float if field.cpp_type in floats else int)  # noqa: E731
        return kinds.get(field.cpp_type, number)()

    def _text(self) -> str:
        return self._random.choice(TEXTS)

    def _number(self, kind: type) -> int | float:
        value = self._random.choice(NUMBERS) if self._random.random() < 0.4 else self._random.randrange(40)
        return value if kind is float or isinstance(value, int) else 3


def limited(request: Any) -> Any:
    """The request with few tokens to say: what is tested is how it is read."""
    holder = request.sampling_params if hasattr(request, "sampling_params") else request
    if holder.max_tokens > 4 or not holder.HasField("max_tokens"):
        holder.max_tokens = 4
    holder.n = min(holder.n, 20)
    request.request_id = ""
    return request


def answer(call: Callable[..., Any], request: Any, timeout: float = 20.0) -> tuple[StatusCode, str]:
    """How the service ends the call, and the field that it names."""
    try:
        for _ in call(request, timeout=timeout):
            pass
    except grpc.RpcError as error:
        failure = ServiceError.of(error)
        return failure.code, failure.field
    return StatusCode.OK, ""


def run(
    channel: grpc.Channel, requests: int, seed: int, answered: Callable[[], None] = lambda: None
) -> tuple[collections.Counter[str], list[str]]:
    """Answers by status, and a line for each answer that should not have been given; tells of each `answered` one."""
    from smg_grpc_proto import vllm_engine_pb2 as worker
    from smg_grpc_proto import vllm_engine_pb2_grpc

    fuzzer = Fuzzer(seed)
    doors = (
        (worker.GenerateRequest, vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate),
        (messages.GenerateRequest, services.GenerateStub(channel).Generate),
    )
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for number in range(requests):
        kind, call = doors[number % 2]
        request = limited(fuzzer.request(kind))
        code, field = answer(call, request)
        answered()
        counts[code.name] += 1
        nameless = code is StatusCode.INVALID_ARGUMENT and not field
        if code not in ENDINGS or nameless:
            wrong.append(f"seed {seed}, request {number}: {code.name}, field {field!r}, of {str(request)[:300]!r}")
    return counts, wrong


def progress(requests: int) -> Callable[[], None]:
    """What shows how many requests have been answered, on a terminal; called in any thread."""
    numbers, live = itertools.count(1), sys.stderr.isatty()

    def tell() -> None:
        number = next(numbers)
        if live and (number % 100 == 0 or number == requests):
            end = "\n" if number == requests else "\r"
            print(f"{number} of {requests} requests", end=end, file=sys.stderr, flush=True)

    return tell


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    flags = program.parse(Flags, "serving.service.fuzz", arguments)
    return program.run(lambda: fuzz(flags))


def fuzz(flags: Flags) -> int:
    """Sends, counts and prints."""
    shares = [len(range(client, flags.requests, flags.clients)) for client in range(flags.clients)]
    seeds = [flags.seed * flags.clients + client for client in range(flags.clients)]
    with (
        server_at(flags.target) as server,
        grpc.insecure_channel(server.target) as channel,
        ThreadPoolExecutor(flags.clients) as pool,
    ):
        tell = progress(flags.requests)
        results = list(pool.map(lambda share, seed: run(channel, share, seed, tell), shares, seeds))
    counts = sum((counts for counts, _ in results), collections.Counter())
    wrong = [line for _, lines in results for line in lines]
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    print(f"{flags.requests} requests: {dict(counts)}, {len(wrong)} answered as none should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
