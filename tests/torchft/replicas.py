"""Replicas under torchft, one a thread: a real lighthouse, real managers, failures on purpose, balanced books.

A process of its own, since torchft leaves sockets and threads behind. It runs the scenarios that are named, and
prints what each returned as JSON.
"""

import json
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft._torchft import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

import rtopk.torchft
from rtopk import DecayedErrorFeedback, TopK
from rtopk.seed import generator
from rtopk.torchft import books as books_module

STEPS, EVERY = 6, 4


class Recording(books_module.Books):
    """Remember every update that was added, and what was sent of it."""

    def _message(self, update):
        sent = []
        self.log = getattr(self, "log", {})
        self.sparsifier.watch = sent.append
        message = super()._message(update)
        if self._doubt is not None:
            self.log[self._doubt.token] = update.double().clone(), sent[0].to_dense().double()
        return message


class Unlucky(rtopk.torchft.ProcessGroup):
    """Its reductions fail when told to, after the others have received everything."""

    fails = False

    def allreduce(self, tensors, opts):
        work = super().allreduce(tensors, opts)
        if self.fails:
            work.wait()
            raise RuntimeError("the link of this replica broke")
        return work


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 5))


def train(number, address, misfortune, barrier, lock, fragments=1, steps=STEPS, **options):
    """Train one replica until `steps` rounds are committed; return its weights, books and failed commits."""
    with lock:  # the seed is of the whole process
        model = network()
    data = torch.randn(64, 16, generator=generator("data", number))
    targets = torch.randn(64, 5, generator=generator("targets", number))
    group = Unlucky(ProcessGroupGloo(timeout=timedelta(seconds=20)))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    layers = [model] if fragments == 1 else [model[0], model[2]]
    manager = Manager(
        pg=group, min_replica_size=2, use_async_quorum=False, init_sync=False, replica_id=f"replica{number}",
        load_state_dict=model.load_state_dict, state_dict=model.state_dict, store_addr="localhost",
        store_port=store.port, rank=0, world_size=1, lighthouse_addr=address,
        timeout=timedelta(seconds=20), quorum_timeout=timedelta(seconds=60),
    )  # fmt: skip
    failed, begun = 0, [p.detach().clone() for layer in layers for p in layer.parameters()]
    outers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers]
    with rtopk.torchft.DiLoCo(
        manager, layers, inner, outers, EVERY, **{"density": 0.1, "selector": TopK(), **options}
    ) as trainer:
        barrier.wait()
        tried = 0
        while manager.current_step() < steps:
            before = manager.current_step()
            group.fails = misfortune(number, tried) == "link"
            for _ in range(EVERY // fragments):
                loss = nn.functional.mse_loss(model(data), targets)
                inner.zero_grad()
                loss.backward()
                if misfortune(number, tried) == "nan":
                    model[0].weight.grad[0, 0] = float("nan")
                inner.step()
            tried += 1
            failed += manager.current_step() == before
    barrier.wait()  # nobody leaves while another heals
    manager.shutdown(wait=False)
    common = [fragment.original_parameters for fragment in trainer._fragments]
    return {"common": common, "begun": begun, "books": trainer.books, "failed": failed, "tried": tried}


def run(misfortune=lambda number, tried: None, replicas=3, **options):
    # Nobody leaves, so every quorum waits for all: on a busy machine one may be later than any timeout.
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=replicas, join_timeout_ms=1000)
    barrier, lock = threading.Barrier(replicas), threading.Lock()
    with ThreadPoolExecutor(replicas) as pool:
        try:
            jobs = [
                pool.submit(train, n, lighthouse.address(), misfortune, barrier, lock, **options)
                for n in range(replicas)
            ]
            return [job.result(timeout=120) for job in jobs]
        finally:
            lighthouse.shutdown()


def balance(found):
    """Common weights and residuals are what the receipts say; all replicas have the same ones, to the bit."""
    begun = iter(found[0]["begun"])
    for place, common in enumerate(found[0]["common"]):
        books = [one["books"][place] for one in found]
        receipts = list(books[0].receipts)
        for one, other in zip(found, books, strict=True):
            assert list(other.receipts) == receipts
            assert all(torch.equal(one["common"][place][name], common[name]) for name in common)
        tokens = [token for _, *tokens in receipts for token in tokens]
        assert len(set(tokens)) == len(tokens)  # nothing is applied twice
        layout = books[0].layout
        start = layout.flatten({name: next(begun) for name in common}).double()
        sent = {token: parts for one in books for token, parts in one.log.items()}
        moved = sum(sum(sent[t][1] for t in takers) / len(takers) for _, *takers in receipts)
        torch.testing.assert_close(layout.flatten(common).double(), start - moved, atol=2e-6, rtol=0)
        for own in books:
            own.settle(applied=False)
            kept = sum(came - gone for token, (came, gone) in own.log.items() if token in tokens)
            if own.how.memory is rtopk.ErrorFeedback:
                torch.testing.assert_close(own.sparsifier.memory.residual.double(), kept, atol=2e-6, rtol=0)


def undisturbed():
    return run()


def link_of_one():
    """Replica 1 fails after its payload has arrived: it heals, and must not send the same again."""
    return run(lambda number, tried: "link" if (number, tried) == (1, 2) else None)


def link_of_all():
    return run(lambda number, tried: "link" if tried == 2 else None)


def not_finite():
    return run(lambda number, tried: "nan" if (number, tried) == (2, 3) else None, steps=5)


def streaming(values="fp32"):
    """Two fragments in turn, sent a step before they are applied; one replica fails on the way."""
    return run(
        lambda number, tried: "link" if (number, tried) == (0, 3) else None, fragments=2, steps=8,
        fragment_sync_delay=1, values=values, density=0.2,
    )  # fmt: skip


def streaming_in_4_bits():
    return streaming("4bit")


def decayed():
    return run(
        lambda number, tried: "link" if tried == 2 else None, memory=DecayedErrorFeedback, values="2bit"
    )


if __name__ == "__main__":
    rtopk.torchft.Books = Recording
    results = {}
    for name in sys.argv[1:]:
        try:
            found = globals()[name]()
            balance(found)
            senders = [[len(receipt) - 1 for receipt in books.receipts] for books in found[0]["books"]]
            results[name] = {"failed": [one["failed"] for one in found], "senders": senders}
        except Exception:
            results[name] = {"raised": traceback.format_exc()}
    print(json.dumps(results), flush=True)
