"""Serves the chat page: a few fixed files, and where the gateway is."""

import http.server
import importlib.resources
import json
import threading

TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
FILES = ("index.html", "chat.js", "style.css")


def contents(gateway: str) -> dict[str, tuple[str, bytes]]:
    """Path -> type and bytes of everything that is served.

    `gateway` is its URL as the browser sees it, or `:port` on the page's own host.
    """
    folder = importlib.resources.files("serving.gateway") / "page"
    files = {f"/{name}": (TYPES[name.rpartition(".")[2]], (folder / name).read_bytes()) for name in FILES}
    config = ("application/json", json.dumps({"gateway": gateway}).encode())
    return {**files, "/": files["/index.html"], "/config.json": config}


class PageServer:
    """A thread that serves the page."""

    def __init__(self, host: str, port: int, gateway: str) -> None:
        """`port` 0 takes a free one. Raises `OSError` when it is taken."""
        served = contents(gateway)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = served.get(self.path.partition("?")[0])
                kind, body = found or ("text/plain", b"not found\n")
                self.send_response(200 if found else 404)
                for name, value in {
                    "Content-Type": kind,
                    "Content-Length": len(body),
                    "Cache-Control": "no-cache",
                }.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        try:
            self._server = http.server.ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            why = f"cannot serve the chat page on {host}:{port} ({error.strerror}); give another --page-port"
            raise OSError(why) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="page", daemon=True)

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = self._server.server_address[:2]
        return f"http://{host}:{port}"

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
