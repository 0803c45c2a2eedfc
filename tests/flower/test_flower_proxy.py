"""The proxy counts every byte, and the ledger counts what Flower serialises."""

import socket
import threading

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto

from rtopk.flower.records import ByteLedger, content_bytes, payload_array
from rtopk.studies.federation.engines import CountingProxy


def serve_once(listener, received, answer):
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(1 << 16):
            received += data
        connection.sendall(answer)


def test_the_proxy_counts_both_ways_and_changes_nothing():
    question, answer = bytes(range(256)) * 1000, b"x" * 70_001
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve_once, args=(listener, received, answer))
        server.start()
        with (
            CountingProxy(listener.getsockname()[1]) as proxy,
            socket.create_connection(("127.0.0.1", proxy.port)) as client,
        ):
            client.sendall(question)
            client.shutdown(socket.SHUT_WR)
            heard = b"".join(iter(lambda: client.recv(1 << 16), b""))
            server.join()
            assert (bytes(received), heard) == (question, answer)
            assert (proxy.up, proxy.down, proxy.connections) == (len(question), len(answer), 1)


def test_the_ledger_counts_about_what_protobuf_does():
    """Flower sends a content as nested objects; their bytes are those of its protobuf and their ids."""
    payload = torch.arange(50_000, dtype=torch.int64).to(torch.uint8)
    content = RecordDict(
        {"arrays": ArrayRecord({"rtopk.0": payload_array(payload)}), "rtopk": ConfigRecord({"a": 1})}
    )
    size = content_bytes(content)
    whole = recorddict_to_proto(content).ByteSize()
    assert payload.numel() < size
    assert abs(size - whole) < 600
    ledger = ByteLedger()
    header = RecordDict({"rtopk": ConfigRecord({"a": 1})})
    ledger.count(1, "up", content)
    ledger.count(1, "down", header)
    assert ledger.rounds[1].total == size + content_bytes(header)
    assert ledger.to_dict()["1"]["up_framing"] == size - payload.numel()
    assert ledger.to_dict()["1"]["down_payload"] == 0
