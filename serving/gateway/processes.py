"""The service and the gateway as child processes."""

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

from serving.gateway.workers import Reminder

PARSER = "kimi_k3"
"""What smg calls K3's reasoning and tool-call syntax."""


class ChildDied(RuntimeError):
    """A process that should have become ready, or stayed, has ended."""


def require_smg() -> None:
    """Raises `RuntimeError` when the gateway is not installed."""
    if importlib.util.find_spec("smg") is None:
        raise RuntimeError("the gateway smg is not installed; install the extra: pip install 'k3jax[gateway]'")


def free_port(host: str = "127.0.0.1", port: int = 0) -> int:
    """A port that nobody listens on just now: `port`, or any for 0. Raises `OSError` when it is taken."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # clients of an earlier gateway do not count
        try:
            listener.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port} ({error.strerror}); give another --port") from error
        return listener.getsockname()[1]


def service_command(arguments: Sequence[str]) -> list[str]:
    """How to start the service with these flags."""
    return [sys.executable, "-m", "serving", *arguments]


def gateway_command(
    workers: Sequence[str], *, host: str, port: int, metrics_port: int, origins: Sequence[str] = (), log: str = "warn"
) -> list[str]:
    """How to start smg in front of gRPC `workers` (host:port). `origins`: pages that may call it from a browser."""
    urls = [worker if "//" in worker else f"grpc://{worker}" for worker in workers]
    command = [sys.executable, "-m", "smg", "launch", "--backend", "vllm", "--worker-urls", *urls]
    command += ["--host", host, "--port", str(port), "--policy", "cache_aware"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--reasoning-parser", PARSER, "--tool-call-parser", PARSER, "--log-level", log]
    # Its default is to look at a worker again after half a minute.
    command += ["--worker-startup-check-interval", "1"]
    return [*command, *(["--cors-allowed-origins", *origins] if origins else [])]


@contextlib.contextmanager
def running(
    command: Sequence[str], *, stop_seconds: int | float = 40.0, **options: object
) -> Iterator[subprocess.Popen[str]]:
    """The process while the block runs; then it is asked to end, and killed when it does not."""
    process = subprocess.Popen(command, text=True, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(stop_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def named(process: "subprocess.Popen[str]") -> str:
    """The module that a process runs."""
    assert isinstance(process.args, list)
    return str(process.args[2])


def service_address(process: "subprocess.Popen[str]") -> str:
    """Waits for the line `ready host:port` of the service; raises `ChildDied` if it ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        word, _, address = line.strip().partition(" ")
        if word == "ready":
            return address
    raise ChildDied(f"the service ended with code {process.wait()} before it was ready; its messages say why")


def wait_for_models(url: str, processes: Sequence["subprocess.Popen[str]"], seconds: int | float = 600.0) -> list[str]:
    """Waits until the gateway lists models; returns their names. Raises `ChildDied` or `TimeoutError`.

    The services behind it are ready already, so that it takes seconds, on a machine that does much else a minute.
    """
    end, reminder = time.monotonic() + seconds, Reminder(f"the gateway at {url} to list a model")
    while time.monotonic() < end:
        reminder.tell()
        for process in processes:
            if process.poll() is not None:
                raise ChildDied(f"{named(process)} ended with code {process.returncode} before the gateway was ready")
        names = _models(url)
        if names:
            return names
        time.sleep(0.1)
    raise TimeoutError(f"the gateway at {url} lists no model after {seconds:g} s; see its messages")


def _models(url: str) -> list[str]:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return [model["id"] for model in json.load(answer)["data"]]
    except (OSError, ValueError, KeyError, urllib.error.URLError):
        return []


def wait_for_end(processes: Sequence["subprocess.Popen[str]"]) -> "subprocess.Popen[str]":
    """Waits until one of the processes ends, and returns it."""
    while True:
        for process in processes:
            if process.poll() is not None:
                return process
        time.sleep(0.2)
