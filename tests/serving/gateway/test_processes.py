"""Child processes of the gateway program: how they are started, found ready, and ended."""

import http.server
import itertools
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from serving.gateway import __main__ as gateway
from serving.gateway import processes
from serving.gateway.page_server import PageServer

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def python(code):
    return [sys.executable, "-c", code]


def test_the_gateway_is_told_who_works_and_how_k3_speaks():
    command = processes.gateway_command(
        ["127.0.0.1:1", "grpcs://h:2"], host="::1", port=7, metrics_port=8, origins=["http://page"]
    )
    assert command[1:4] == ["-m", "smg", "launch"]
    options = dict(itertools.pairwise(command))
    assert options["--worker-urls"] == "grpc://127.0.0.1:1"
    assert command[command.index("--worker-urls") + 2] == "grpcs://h:2"
    assert (options["--host"], options["--port"], options["--prometheus-port"]) == ("::1", "7", "8")
    assert options["--reasoning-parser"] == options["--tool-call-parser"] == "kimi_k3"
    assert options["--cors-allowed-origins"] == "http://page"


def test_the_ready_line_is_found_among_others():
    code = "print('loading'); print('ready 127.0.0.1:5'); import time; time.sleep(60)"
    with processes.running(["env", "PYTHONUNBUFFERED=1", *python(code)], stdout=subprocess.PIPE) as process:
        assert processes.service_address(process) == "127.0.0.1:5"
    assert process.returncode is not None


def test_a_service_that_ends_first_is_reported():
    with processes.running(python("raise SystemExit(3)"), stdout=subprocess.PIPE) as process:
        with pytest.raises(processes.ChildDied, match="code 3 before it was ready"):
            processes.service_address(process)
        with pytest.raises(processes.ChildDied, match="ended with code 3 before the gateway"):
            processes.wait_for_models("http://127.0.0.1:1", [process])
        assert processes.wait_for_end([process]) is process


def test_a_process_that_will_not_end_is_killed():
    start = time.monotonic()
    with processes.running(python(STUBBORN), stop_seconds=0.2, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "up\n"
    assert process.returncode == -9
    assert time.monotonic() - start < 30


class Models(http.server.BaseHTTPRequestHandler):
    answers = iter(())

    def do_GET(self):
        body = next(self.answers)
        self.send_response(200 if body else 503)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_models_are_waited_for():
    Models.answers = iter([b"", b"no JSON", b'{"data": []}', b'{"data": [{"id": "nano"}]}'])
    server = http.server.HTTPServer(("127.0.0.1", 0), Models)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert processes.wait_for_models(url, [], seconds=20) == ["nano"]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    with pytest.raises(TimeoutError, match=r"lists no model after 0\.1 s"):
        processes.wait_for_models(url, [], seconds=0.1)


def test_usage(capsys, monkeypatch):
    monkeypatch.setattr(processes, "require_smg", lambda: None)
    assert gateway.main(["--worker", "127.0.0.1:1", "--", "--pages", "4"]) == 2
    assert "--worker names a running service" in capsys.readouterr().err


def test_without_smg_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: None)
    assert gateway.main([]) == 1
    assert "smg is not installed; install the extra" in capsys.readouterr().err


def test_a_service_that_cannot_start_ends_the_gateway(capfd, monkeypatch):
    monkeypatch.setattr(processes, "require_smg", lambda: None)
    assert gateway.main(["--port", "0", "--page-port", "0", "--", "--pages", "0"]) == 1
    error = capfd.readouterr().err
    assert "--pages is 0, expected at least 1" in error
    assert "the service ended with code 2 before it was ready" in error


@pytest.mark.parametrize(("flag", "what"), [("--port", "listen on"), ("--page-port", "serve the chat page on")])
def test_a_taken_port_is_named_before_anything_is_loaded(flag, what, capsys, monkeypatch):
    monkeypatch.setattr(processes, "require_smg", lambda: None)
    monkeypatch.setattr(processes, "service_command", lambda flags: pytest.fail("the service was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ports = {"--port": "0", "--page-port": "0"} | {flag: port}
        assert gateway.main([text for pair in ports.items() for text in pair]) == 1
    assert (
        f"error: cannot {what} 127.0.0.1:{port} (Address already in use); give another {flag}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_page_finds_the_gateway(host, monkeypatch):
    served = []

    class Page(PageServer):
        def __init__(self, host, port, gateway):
            served.append((host, port, gateway))

        def start(self):
            pass

    monkeypatch.setattr(gateway, "PageServer", Page)
    gateway._page(gateway.Options(host=host, page_port=7), 5)
    assert served == [(host, 7, "http://127.0.0.1:5" if host == "127.0.0.1" else ":5")]


def test_a_signal_while_the_service_loads_ends_both(tmp_path):
    """The service here never gets ready; it must not be left behind."""
    program = (
        "import sys; from serving.gateway import __main__ as gateway, processes\n"
        "processes.require_smg = lambda: None\n"
        "code = 'import os, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)'\n"
        "processes.service_command = lambda flags: [sys.executable, '-c', 'import sys; ' + code]\n"
        "sys.exit(gateway.main(['--port', '0', '--page-port', '0']))"
    )
    process = subprocess.Popen(python(program), stderr=subprocess.PIPE, text=True)
    child = int(process.stderr.readline())
    process.terminate()
    assert process.wait(30) == 0
    process.stderr.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
