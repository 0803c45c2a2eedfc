"""A stranger adds a selector, a memory and a value form, each in one file of a package of their own.

Nothing of ours is touched: laws, hook, command line and equal bytes serve them as they serve ours.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import laws

FILES = {
    "selector.py": '''
"""Every other of the largest."""
from dataclasses import dataclass
from rtopk import Rule, top_k

@dataclass(frozen=True)
class EveryOther(Rule, method="every-other-k"):
    """Send every other of the 2 k largest entries, from the first; all if all are asked for."""

    def select(self, vector, k, rng):
        return top_k(vector, min(vector.numel(), 2 * k))[::2] if 2 * k <= vector.numel() else top_k(vector, k)
''',
    "memory.py": '''
"""Error feedback with slots, and its residual inside another object."""
import torch

class Shelf:
    __slots__ = ("content",)

class Slotted:
    __slots__ = ("shelf",)

    def __init__(self):
        self.shelf = Shelf()
        self.shelf.content = None

    def add(self, gradient, search=None):
        if not bool(gradient.isfinite().all()):
            raise ValueError("gradient must be finite")
        held = self.shelf.content
        self.shelf.content = gradient.detach().float().clone() if held is None else held + gradient
        return self.shelf.content

    def subtract(self, sent):
        self.shelf.content[sent.indices] -= sent.values

    @property
    def residual(self):
        return self.shelf.content

    def state_dict(self):
        return {} if self.shelf.content is None else {"residual": self.shelf.content.clone()}

    def load_state_dict(self, state):
        self.shelf.content = state["residual"].clone() if state else None
''',
    "form.py": '''
"""Values with their lower 12 bits cut off, three bytes each."""
import numpy as np
from rtopk.wire.values import add_form

class Cut:
    name, exact, block, divisible_from = "fp24", False, 1, 1 << 60

    def size(self, n):
        return 3 * n

    def write(self, values, draws, decoded, at, out):
        words = values.view(np.uint32) & np.uint32(0xFFFFFF00)
        decoded[:] = words.view(np.float32)
        for byte in range(3):
            out[at + byte : at + 3 * len(values) : 3] = words >> np.uint32(8 * (byte + 1)) & np.uint32(255)

    def read(self, data, at, out):
        words = np.zeros(len(out), np.uint32)
        for byte in range(3):
            words |= data[at + byte : at + 3 * len(out) : 3].astype(np.uint32) << np.uint32(8 * (byte + 1))
        out[:] = words.view(np.float32)
        return bool(np.isfinite(out).all())

add_form(Cut())
''',
    "job.py": '''
"""Two ranks of DDP with all three; a NaN is skipped by both, and the state is saved and read again."""
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import rtopk
from stranger.selector import EveryOther
from stranger.memory import Slotted
import stranger.form

rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def make():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    model = DDP(net)
    state = rtopk.ddp.register(model, density=0.1, selector=EveryOther(), memory=Slotted, values="fp24")
    return net, model, torch.optim.SGD(net.parameters(), lr=0.1), state

def train(net, model, optimizer, steps):
    for step in steps:
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 2 and rank == 1:
            inputs[0, 0] = float("nan")
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), torch.arange(5) % 3).backward()
        optimizer.step()

net, model, optimizer, state = make()
train(net, model, optimizer, range(4))
assert state.stats.skipped == 1, state.stats
state.save(folder)
weights = {name: p.clone() for name, p in net.state_dict().items()}
train(net, model, optimizer, range(4, 8))
again, model, optimizer, other = make()
again.load_state_dict(weights)
other.load(folder)
train(again, model, optimizer, range(4, 8))
for a, b in zip(net.parameters(), again.parameters()):
    assert torch.equal(a, b)
    assert bool(a.isfinite().all())
dist.destroy_process_group()
print("done")
''',
}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    (folder / "stranger").mkdir()
    (folder / "stranger" / "__init__.py").touch()
    for name, text in FILES.items():
        (folder / "stranger" / name).write_text(text.lstrip())
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    from rtopk.select import METHODS
    from rtopk.wire.values import BY_NAME, FORMS

    METHODS.pop("every-other-k", None)
    if "fp24" in BY_NAME:
        del FORMS[BY_NAME.pop("fp24")]


@pytest.fixture
def three(stranger):
    from rtopk import Codec

    selector, memory, _ = (
        importlib.import_module(f"stranger.{name}") for name in ("selector", "memory", "form")
    )
    return selector.EveryOther, memory.Slotted, lambda: Codec("fp24")


def test_the_laws_hold(three):
    selector, memory, codec = three
    for density in (0.05, 0.5):
        laws.nothing_lost(selector(), memory(), codec(), density=density)
    laws.arguments_untouched(selector(), memory(), codec())
    for name in laws.MEMORIES:
        if name != "NoMemory":
            laws.nothing_lost(selector(), laws.MEMORIES[name](), codec())
    for name in laws.SELECTORS:
        laws.nothing_lost(laws.SELECTORS[name](), memory(), codec())


def test_a_round_trip_in_the_hook(stranger, tmp_path):
    """Two processes; skip together, save, load, and go on to the same bits."""
    path = os.pathsep.join([str(stranger), str(Path(__file__).parents[1] / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(stranger / "stranger/job.py"), str(rank), str(tmp_path / "store"), str(tmp_path)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, errors = rank.communicate(timeout=240)
        assert out == "done\n", errors[-3000:]


def test_a_run_at_equal_bytes(three, tmp_path):
    """The rule is fitted to a budget and tuned beside top-k, its values in the stranger's form."""
    import dataclasses

    from rtopk.studies.equal_bytes import PANELS, Budget, Entrant, rivals_page, smoke_panel

    selector, _, _ = three
    entrants = (Entrant("top-k"), Entrant(selector.method, values="fp24"))
    panel = dataclasses.replace(
        smoke_panel(PANELS["digits"][-1]), budgets=((Budget(density=0.01), entrants),)
    )
    standings = run_panel(panel, tmp_path)
    labels = {standing.entrant.label: standing for standing in standings}
    assert set(labels) >= {"top-k", "every-other-k, fp24"}
    sent = labels["every-other-k, fp24"].sent_bytes_per_round / labels["top-k"].sent_bytes_per_round
    assert 0.9 < sent < 1.1
    rivals_page.score_against_budget(standings, tmp_path / "picture.png")  # with a colour of its own
    assert "every-other-k, fp24" in rivals_page.markdown([standings])


def run_panel(panel, folder):
    """Run a panel's entrants, one seed each."""
    from rtopk.studies.equal_bytes.fit import Runs, entrant_runs, run_together, side_by_side

    runs = Runs(folder / "results.jsonl", folder / "runs", 1)
    return [
        result
        for group in side_by_side([panel])
        for result in run_together([entrant_runs(*entrant, 1) for entrant in group], runs)
    ]
