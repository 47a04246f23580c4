"""A proxy before the server, which notes every request: clients repeat a request that fails, and tell nobody."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOP = {"connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding"}
"""Headers of one connection, which each side of the proxy writes for itself."""


@dataclass
class Exchange:
    """A request, and the status of its answer, 0 if there is none; error: the body of an answer that is an error."""

    method: str
    path: str
    body: dict[str, Any]
    status: int = 0
    error: str = ""

    @property
    def route(self) -> str:
        """The last part of the path."""
        return urlsplit(self.path).path.rsplit("/", 1)[-1]

    @property
    def asks(self) -> bool:
        """Whether the request asks for an answer."""
        return self.method == "POST" and self.route in ("completions", "responses", "messages")

    @property
    def both(self) -> bool:
        """Whether the request has functions and a schema for the answer."""
        text, output = self.body.get("text") or {}, self.body.get("output_config") or {}
        forms = [self.body.get("response_format"), text.get("format"), output.get("format")]
        return bool(self.body.get("tools")) and any(form and form.get("type") == "json_schema" for form in forms)


@contextmanager
def recording(url: str, more: Callable[[Exchange], dict[str, Any]]) -> Iterator[tuple[str, list[Exchange]]]:
    """The address of a proxy before the server at ``url``, and the list to which it adds what passes; more: gives the
    fields that are added to a request for an answer."""
    exchanges: list[Exchange] = []
    server = urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                body = json.loads(data) if data else {}
            except ValueError:
                body = {}
            exchange = Exchange(self.command, self.path, body if isinstance(body, dict) else {})
            exchanges.append(exchange)
            if exchange.asks:
                data = json.dumps(exchange.body | more(exchange)).encode()
            upstream = HTTPConnection(server.hostname or "127.0.0.1", server.port, timeout=600)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            try:
                upstream.request(self.command, self.path, data or None, headers)
                answer = upstream.getresponse()
                exchange.status = answer.status
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP:
                        self.send_header(name, value)
                if self.command == "HEAD" or answer.status in (204, 304):
                    self.end_headers()
                    return
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while piece := answer.read1(65536):
                    if answer.status >= 400:
                        exchange.error += piece.decode("utf-8", "replace")
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client has left
            finally:
                upstream.close()

        do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = do_OPTIONS = _pass

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Proxy(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # that of a client that has left
                super().handle_error(request, client_address)

    proxy = Proxy(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}", exchanges
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
