"""The chat page in headless Chromium, before a gateway whose answers are known."""

import http.server
import json
import threading

import pytest

from serving.gateway.page_server import PageServer, contents
from tests.serving.gateway.browser import browser


class Gateway(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send(self, status, kind, body=b"", **headers):
        self.send_response(status)
        cors = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Headers": "content-type"}
        for name, value in {"Content-Type": kind, **cors, **headers}.items():
            self.send_header(name, value)
        if not headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_OPTIONS(self):
        self.send(204, "text/plain")

    def do_GET(self):
        self.send(200, "application/json", b'{"data":[{"id":"nano-k3"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        script = self.server.scripts.pop(0)
        if isinstance(script, int):
            self.send(script, "application/json", b'{"error":{"message":"the queue is full"}}')
            return
        self.send(200, "text/event-stream", Connection="close")
        try:
            for event in script:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
                if event.get("pause"):
                    self.server.go_on.wait(10)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.hung_up.set()

    def log_message(self, *args):
        pass


def delta(**fields):
    return {"choices": [{"index": 0, "delta": fields}]}


def call(**fields):
    return delta(tool_calls=[{"index": 0, **fields}])


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
}


@pytest.fixture
def gateway():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    server.requests, server.scripts = [], []
    server.go_on, server.hung_up = threading.Event(), threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def page_server(gateway):
    server = PageServer("127.0.0.1", 0, f":{gateway.server_address[1]}")
    server.start()
    yield server
    server.stop()


def test_only_the_page_is_served(page_server):
    import urllib.error
    import urllib.request

    for path, (kind, body) in contents("http://gateway").items():
        with urllib.request.urlopen(page_server.url + path) as answer:
            assert answer.headers["Content-Type"] == kind
            if path != "/config.json":
                assert answer.read() == body
    for path in ("/../__init__.py", "/page_server.py", "//etc/passwd"):
        with pytest.raises(urllib.error.HTTPError, match="404") as caught:
            urllib.request.urlopen(page_server.url + path)
        caught.value.close()


def test_a_conversation(gateway, page_server, tmp_path):
    markup = "<img src=x onerror='window.hacked=1'>"
    thinking = [delta(role="assistant", content=""), delta(reasoning_content="hm,"), delta(reasoning_content=" so")]
    gateway.scripts = [
        [*thinking, {**delta(content="Hel"), "pause": True}, delta(content=f"lo é {markup}"), END, USAGE],
        429,
        [call(id="call_1", function={"name": "get", "arguments": ""}), call(function={"arguments": '{"a":1}'}), END],
        [{**delta(content="on and"), "pause": True}, *[delta(content=" on")] * 1000],
    ]
    with browser(tmp_path) as page:
        page.open(page_server.url)
        page.until("document.querySelector('#model')?.textContent === 'nano-k3'")

        page.type("#question", "hi <b>")
        page.press_enter()
        page.until("document.querySelector('.assistant > .text')?.textContent === 'Hel'")
        # It streams: the rest has not been sent yet, and the button stops instead of sending.
        assert page.text("#send") == ["Stop"]
        assert page.text(".reasoning summary") == ["Reasoning …"]
        gateway.go_on.set()
        page.until("document.querySelector('.stats') !== null")
        assert page.text(".assistant > .text") == [f"Hello é {markup}"]
        assert page.text(".user > .text") == ["hi <b>"]
        assert page.text(".reasoning .text") == ["hm, so"]
        assert page.value("document.querySelector('.reasoning').open") is False
        assert page.value("window.hacked") is None
        [figures] = page.text(".stats")
        assert figures.startswith("stop · 9 tokens in (2 cached) · 4 out · ")

        page.type("#question", "again")
        page.click("#send")
        page.until("document.querySelector('article .error') !== null")
        assert page.text("article .error") == ["the queue is full"]
        assert page.value("document.querySelector('#question').value") == "again"

        page.value("document.querySelector('#effort').value = 'none'")
        page.press_enter()
        page.until("document.querySelectorAll('.stats').length === 2")
        assert page.text(".call") == ['get({"a":1})']

        gateway.go_on.clear()
        page.type("#question", "stop me")
        page.press_enter()
        page.until("[...document.querySelectorAll('.assistant > .text')].at(-1).textContent === 'on and'")
        page.click("#send")
        page.until("document.querySelectorAll('.stats').length === 3")
        assert page.text(".stats")[-1].startswith("stopped")
        gateway.go_on.set()
        assert gateway.hung_up.wait(10)

        page.click("#new")
        assert page.text("article") == []
        assert page.errors == []
    first, second, third, fourth = gateway.requests
    assert first["messages"] == [{"role": "user", "content": "hi <b>"}]
    assert (first["model"], first["stream"], first["reasoning_effort"]) == ("nano-k3", True, "low")
    # The whole message goes back, its reasoning too; an answer that failed leaves nothing behind.
    said = {"role": "assistant", "content": f"Hello é {markup}", "reasoning_content": "hm, so"}
    assert second["messages"] == [first["messages"][0], said, {"role": "user", "content": "again"}]
    assert third == second | {"reasoning_effort": "none"}
    [made] = fourth["messages"][-2]["tool_calls"]
    assert made == {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"a":1}'}}


def test_no_gateway(tmp_path):
    server = PageServer("127.0.0.1", 0, "http://127.0.0.1:1")
    server.start()
    try:
        with browser(tmp_path) as page:
            page.open(server.url)
            page.until("document.querySelector('#model')?.textContent.startsWith('no gateway: ')")
    finally:
        server.stop()
