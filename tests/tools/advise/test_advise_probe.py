"""The probe between two hosts, over loopback."""

import socket
import threading
import time

from rtopk.tools.advise.machine import listen, probe


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def listening(port):
    errors = []

    def run():
        try:
            listen(port, "127.0.0.1")
        except ConnectionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    return thread, errors


def test_probe_measures_and_the_listener_ends():
    port = free_port()
    thread, errors = listening(port)
    found = probe("127.0.0.1", port, seconds=0.1)
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert not errors
    assert found.mbit > 50  # loopback
    assert 0 < found.latency_ms < 100


def test_strangers_are_refused():
    port = free_port()
    thread, errors = listening(port)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        thread.join(timeout=30)
    assert errors == ["the other side is not `rtopk advise --probe`"]


def test_a_prober_that_hangs_up_ends_the_listener():
    port = free_port()
    thread, errors = listening(port)
    socket.create_connection(("127.0.0.1", port)).close()
    thread.join(timeout=30)
    assert errors
