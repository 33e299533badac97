"""`python -m serving.gateway`: service, gateway and chat page with one command."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

from k3jax import program
from serving.gateway import processes
from serving.gateway.page_server import PageServer
from serving.gateway.workers import wait_until_ready


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Starts smg in front of the service, and a chat page. OpenAI and Anthropic clients can then talk to K3.

    Without --worker the service is started too. Ctrl-C or SIGTERM ends everything; the service drains first.

    Examples:
      python -m serving.gateway
      python -m serving.gateway --checkpoint DIR --port 30000
      python -m serving.gateway --worker 127.0.0.1:50051 --worker 127.0.0.1:50052
      python -m serving.gateway -- --max-num-seqs 16 --metrics-port 9090

    What follows `--` are flags of `python -m serving`.
    """

    checkpoint: Path | None = None
    """For the service. Default: the shipped nano."""
    worker: tuple[str, ...] = ()
    """host:port of services that run already, or are about to: they may still compile."""
    host: str = "127.0.0.1"
    """Where gateway and page listen."""
    port: int = 30000
    """Of the gateway; 0 takes a free one."""
    page_port: int = 30080
    """Of the chat page; 0 takes a free one."""
    origin: tuple[str, ...] = ()
    """More origins (http://host:port) from which a browser may call the gateway; needed for the page when --host is not
    loopback."""
    log_level: str = "warn"
    """Of the gateway."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    options = program.parse(Options, "serving.gateway", given[:cut])
    return program.run(lambda: _serve(options, given[cut + 1 :]))


def _serve(options: Options, service_flags: list[str]) -> int:
    processes.require_smg()
    if options.worker and (service_flags or options.checkpoint is not None):
        raise program.UsageError("--worker names a running service; its checkpoint and flags cannot be given here")
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, _stop))
        # A taken port is said before anything has been loaded.
        port = processes.free_port(options.host, options.port)
        page = _page(options, port)
        stack.callback(page.stop)
        children: list[subprocess.Popen[str]] = []
        workers = list(options.worker)
        for worker in workers:
            wait_until_ready(worker)
        if not workers:
            children.append(stack.enter_context(_service(options, service_flags)))
            workers.append(processes.service_address(children[0]))
        children.append(stack.enter_context(_gateway(options, workers, port, page)))
        url = f"http://{_reachable(options.host)}:{port}"
        models = processes.wait_for_models(url, children)
        print(f"ready {url} {page.url}", flush=True)
        where = f"OpenAI base URL {url}/v1, chat page {page.url}"
        print(f"serving {', '.join(models)}: {where}", file=sys.stderr, flush=True)
        died = processes.wait_for_end(children)
    raise processes.ChildDied(f"{processes.named(died)} ended with code {died.returncode}")


def _stop(number: int, frame: object) -> None:
    """Ends everything, once: a second signal must not cut the service's drain short."""
    for later in (signal.SIGTERM, signal.SIGINT):
        signal.signal(later, signal.SIG_IGN)
    sys.exit(0)


def _reachable(host: str) -> str:
    """Where something that listens on `host` is found from here."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _page(options: Options, port: int) -> PageServer:
    # A page that is served on every address finds the gateway on the one that it came from.
    host = "" if _reachable(options.host) != options.host else f"http://{options.host}"
    page = PageServer(options.host, options.page_port, f"{host}:{port}")
    page.start()
    return page


def _gateway(
    options: Options, workers: list[str], port: int, page: PageServer
) -> "contextlib.AbstractContextManager[subprocess.Popen[str]]":
    command = processes.gateway_command(
        workers,
        host=options.host,
        port=port,
        metrics_port=processes.free_port(),
        origins=(page.url, page.url.replace("127.0.0.1", "localhost"), *options.origin),
        log=options.log_level,
    )
    # Its banner must not stand before the line that says where it is.
    return processes.running(command, stdout=sys.stderr, start_new_session=True)


def _service(options: Options, service_flags: list[str]) -> "contextlib.AbstractContextManager[subprocess.Popen[str]]":
    flags = ["--port", "0", *service_flags]
    if options.checkpoint is not None:
        flags += ["--checkpoint", str(options.checkpoint)]
    # A group of its own: Ctrl-C reaches this process alone, which then ends the gateway before the service.
    return processes.running(processes.service_command(flags), stdout=subprocess.PIPE, start_new_session=True)


if __name__ == "__main__":
    sys.exit(main())
