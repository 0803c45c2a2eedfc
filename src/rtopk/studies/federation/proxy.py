"""A TCP proxy that counts: what really goes over the wire between SuperNodes and the SuperLink.

Bytes of the TCP stream: HTTP, gRPC, polling, heartbeats and all; not TCP's own headers.
"""

import socket
import threading
from contextlib import suppress


class CountingProxy:
    """Forward connections from a free port of this machine to a port of it, and count both ways."""

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        self.target = (host, target)
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self.up = self.down = 0  # bytes from clients to the server so far, and back
        self.connections = 0  # so far
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True, name="proxy").start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(self.target)
            except OSError:  # nobody there yet: the client will try again
                client.close()
                continue
            with self._lock:
                self.connections += 1
                self._open |= {client, server}
                if self._closed:
                    client.close()
                    server.close()
                    return
            for source, sink, up in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(source, sink, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._lock:
                    if up:
                        self.up += len(data)
                    else:
                        self.down += len(data)
        except OSError:
            pass
        finally:
            for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
                with suppress(OSError):
                    end.shutdown(how)

    def close(self) -> None:
        """Stop listening and cut what is open."""
        self._listener.close()
        with self._lock:
            self._closed = True
            ends, self._open = self._open, set()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> "CountingProxy":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
