"""A server in a thread of this process, on a port of its own."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.serving.guard import Guard
from engine.serving.process import config_of, listening


@contextmanager
def live(application: Guard, send_bytes: int = 0) -> Iterator[tuple[str, int]]:
    """The address of a server that answers, configured as ``bitmirror serve`` configures it; send_bytes: how much the system
    keeps of what a client has not read, 0: as much as it likes, which may be megabytes."""
    import uvicorn

    with listening("127.0.0.1", 0) as listener:
        if send_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        host, port = listener.getsockname()
        server = uvicorn.Server(config_of(application, application.state.limits, host, port))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server has ended"
                time.sleep(0.01)
            yield host, port
        finally:
            server.should_exit = True
            thread.join()
