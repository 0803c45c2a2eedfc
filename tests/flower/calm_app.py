"""The app of faulty_app with two clients and a good network."""

import os
from functools import partial

import faulty_app
from faulty_app import client_app

__all__ = ["client_app", "server_app"]
server_app = partial(
    faulty_app.server_app, faults=False, rounds=int(os.environ.get("RTOPK_TEST_ROUNDS", "9")), clients=2
)
