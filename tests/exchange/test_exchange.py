"""The sparse all-reduce, all nodes in one process: shares, the books, the bytes, and bad messages."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laws
from rtopk import Codec, ErrorFeedback, Layout, NoMemory, PayloadError, RTopK, SparseVector, Sparsifier, TopK
from rtopk.aggregate import average
from rtopk.exchange import AllReduced, Vector, make_exchange
from rtopk.exchange.owner import Owner
from rtopk.exchange.shares import PartsCodec, Shares, _ascending, assign
from rtopk.kernels.host import answer
from rtopk.replicas.group import Group
from rtopk.schedule import constant
from rtopk.seed import generator
from rtopk.transport import InProcess


class Loop:
    """n nodes that exchange through an all-reduce."""

    def __init__(self, nodes, size, tail=0, *, density=0.05, owner_density=None, mean="nodes", weights=None,
                 memory=ErrorFeedback, codec=Codec, name="all-reduce"):  # fmt: skip
        keeps = getattr(memory(), "keeps", True)
        vector = Vector(size, tail, mean, weights, keeps, seed=3)
        density = constant(density)
        self.exchange = make_exchange(name, InProcess(nodes), vector, codec(), density, owner_density)
        layout = Layout(("head", "tail"), ((size - tail,), (tail,)), tail)
        self.nodes = [
            Sparsifier(TopK(), density, memory(), self.exchange.codec, 3, node=node, layout=layout)
            for node in range(nodes)
        ]
        self.mean, self.weights = mean, weights
        self.sent = []
        for node in self.nodes:
            node.watch = self.sent.append

    def step(self, gradients, step):
        self.sent.clear()
        payloads = [
            node.compress(gradient, step) for node, gradient in zip(self.nodes, gradients, strict=True)
        ]
        return self.exchange.mean(payloads, step)

    def kept_for_all(self):
        return self.exchange.state()["owner_residual"].double()


@settings(max_examples=100)
@given(size=st.integers(1, 400), nodes=st.integers(1, 40), data=st.data())
def test_every_entry_has_one_owner(size, nodes, data):
    tail = data.draw(st.integers(0, size))
    shares = Shares(size, tail, nodes)
    own = [shares.everything(node).numpy() for node in range(nodes)]
    assert sorted(np.concatenate(own).tolist()) == list(range(size))
    for node, positions in enumerate(own):
        assert (np.diff(positions) > 0).all()
        assert (positions[shares.heads[node] :] >= size - tail).all()
        owner, number = shares.of(positions)
        assert (owner == node).all()
        assert number.tolist() == list(range(len(positions)))
    chosen = torch.from_numpy(np.flatnonzero(np.random.default_rng(size).random(size) < 0.3))
    vector = SparseVector(chosen, torch.arange(float(len(chosen))), size)
    joined = shares.join(shares.split(vector)[1])
    assert torch.equal(joined.indices, vector.indices)
    assert torch.equal(joined.values, vector.values)


def test_the_map_stays():
    """Ranks of different versions must agree who owns what."""
    owner, number = Shares(1000, 20, 7).of(np.arange(1000))
    assert (
        hashlib.blake2b(owner.tobytes() + number.tobytes(), digest_size=8).hexdigest() == "f9b44b3bd1115c38"
    )
    with np.errstate(over="ignore"):  # as it is interpreted until it is compiled
        again, place = np.empty_like(owner), np.empty_like(number)
        assign.__wrapped__(np.arange(1000), 980, np.array([140] * 7), again, place)
    assert (owner == again).all()
    assert (number == place).all()


def test_positions_of_a_vector_too_large_for_the_short_way_are_ordered():
    positions = np.array([1 << 40, 3, 7, 1 << 41, 5])
    assert (
        _ascending(positions, 1 << 62).tolist() == _ascending(positions, 1 << 42).tolist() == [1, 4, 2, 0, 3]
    )


@pytest.mark.parametrize("columns", [8, 64, 100, 512, 8 * 233, 8 * 377])
def test_structure_does_not_fall_to_one_owner(columns):
    """A few columns hold all large entries, as outlier dimensions do; each of 8 owners gets its share of them."""
    rows = 800_000 // columns
    large = np.sort(
        (np.arange(rows)[:, None] * columns + np.arange(0, columns, max(1, columns // 4))).ravel()
    )
    counts = np.bincount(Shares(rows * columns, 0, 8).of(large)[0], minlength=8)
    # A hash spreads them like draws: a standard deviation is sqrt(7 / 64 m), five of them a false alarm in 2e-6.
    assert abs(counts - len(large) / 8).max() < 5 * (len(large) * 7 / 64) ** 0.5


FAMILIES = {
    "ErrorFeedback": ErrorFeedback,
    "MomentumCorrection": laws.MEMORIES["MomentumCorrection"],
    "DecayedErrorFeedback": laws.MEMORIES["DecayedErrorFeedback, no decay"],
}


@pytest.mark.parametrize("codec", list(laws.CODECS))
@pytest.mark.parametrize("mean", ["nodes", "received"])
@pytest.mark.parametrize("memory", list(FAMILIES))
@settings(max_examples=4)
@given(
    size=st.integers(1, 300),
    nodes=st.integers(1, 9),
    density=st.sampled_from([0.01, 0.2, 1.0]),
    owner_density=st.sampled_from([None, 0.01, 0.5, "all"]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_nothing_is_lost(codec, mean, memory, size, nodes, density, owner_density, weighted, seed):
    """Applied + the owners' residuals = the mean of what was sent; what was sent is the memories' law."""
    weights = [float(1 + node % 3) for node in range(nodes)] if weighted else None
    loop = Loop(nodes, size, size // 7, density=density, owner_density=owner_density, mean=mean, weights=weights,
                memory=FAMILIES[memory], codec=laws.CODECS[codec])  # fmt: skip
    came, applied, scale = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    steps = 6
    for step, gradient in enumerate(laws.gradients(size * nodes, steps, seed)):
        moved, _ = loop.step(list(gradient.view(nodes, size)), step)
        mean_sent = average(loop.sent, mean, weights).double()
        came, applied = came + mean_sent, applied + moved.double()
        scale = torch.maximum(scale, came.abs() + applied.abs() + mean_sent.abs())
    gap = (applied + loop.kept_for_all() - came).abs()
    assert bool((gap <= 4 * steps * 2.0**-23 * (scale + 1e-30)).all())


def test_the_whole_union_is_the_all_gather_to_the_bit():
    one, two = (Loop(5, 3000, 40, name=name, **how) for name, how in
                (("all-reduce", {"owner_density": "all"}), ("all-gather", {})))  # fmt: skip
    for step, gradient in enumerate(laws.gradients(15000, 5, 1)):
        parts = list(gradient.view(5, -1))
        assert torch.equal(one.step(parts, step)[0], two.step(parts, step)[0])
    assert not one.kept_for_all().any()


def test_density_1_is_the_dense_mean():
    loop = Loop(4, 1000, 13, density=1.0)
    gradient = next(laws.gradients(4000, 1, 2)).view(4, -1)
    expected = average([SparseVector(torch.arange(1000), row, 1000) for row in gradient])
    assert torch.equal(loop.step(list(gradient), 0)[0], expected)


def test_an_owner_without_memory_drops_what_it_does_not_pass_on():
    loop = Loop(3, 500, memory=NoMemory)
    loop.step(list(torch.randn(3, 500, generator=generator("drop"))), 0)
    assert loop.exchange.state() == {}
    moved, _ = loop.step(list(torch.zeros(3, 500)), 1)
    assert not moved.any()


def test_what_a_node_receives_does_not_grow():
    """From 8 nodes on: 2 k (n - 1) / n entries, and a few bytes for each part."""
    received = {}
    for nodes in (2, 8, 32, 64):
        loop = Loop(nodes, 200_000, density=0.01)
        gradients = torch.randn(nodes, 200_000, generator=generator("bytes", nodes)) ** 3
        received[nodes] = loop.step(list(gradients), 0)[1].received
    entry = received[8] / (2 * 2000 * 7 / 8)  # bytes
    assert 4.9 < entry < 5.3  # 32 bits of value, log2(100) + 1.4 of position
    for nodes in (32, 64):
        assert received[nodes] < 2 * 2000 * (nodes - 1) / nodes * entry + 2 * 20 * nodes
    assert received[2] < received[8] < received[32]


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_a_state_goes_on_and_moves_to_other_owners(nodes):
    loop, again = Loop(nodes, 700, 20), Loop(nodes, 700, 20)
    gradients = [list(g.view(nodes, -1)) for g in laws.gradients(700 * nodes, 6, 4)]
    for step in range(3):
        loop.step(gradients[step], step)
    assert again.exchange.load(loop.exchange.state()) is None
    for old, new in zip(loop.nodes, again.nodes, strict=True):
        new.load_state_dict(old.state_dict())
    for step in range(3, 6):
        assert torch.equal(loop.step(gradients[step], step)[0], again.step(gradients[step], step)[0])
    gathering = Loop(nodes, 700, 20, name="all-gather")
    kept = loop.kept_for_all()
    returned = gathering.exchange.load(loop.exchange.state())
    back = torch.zeros(700, dtype=torch.float64) if returned is None else returned.to_dense().double() / nodes
    assert torch.allclose(back, kept, rtol=1e-6)


def test_a_node_of_weight_zero_cannot_take_over():
    loop = Loop(2, 100, weights=[0.0, 1.0], name="all-gather")
    with pytest.raises(ValueError, match="node 0 has weight 0"):
        loop.exchange.load({"owner_residual": torch.ones(100)})


@pytest.mark.parametrize("wrong", [0.0, 1.5, "some", -1])
def test_wrong_owner_densities(wrong):
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
        Loop(2, 100, owner_density=wrong)
    with pytest.raises(ValueError, match="owner_density is for exchange='all-reduce'"):
        Loop(2, 100, owner_density=0.1, name="all-gather")
    with pytest.raises(ValueError, match=r"owner_density must be in \(0, 1\], got 2.0"):
        Loop(2, 100, owner_density=lambda step: 2.0).step([torch.ones(100)] * 2, 0)
    with pytest.raises(ValueError, match="exchange must be one of"):
        Loop(2, 100, name="ring")


@pytest.mark.parametrize("values", ["4bit", "2bit"])
def test_what_waits_for_an_idle_tensor_stays_as_it_is(values):
    """Few bits have no zero: what is made of it in a tail that nobody used must not pile up in the residual."""
    vector, shares, idle = Vector(60, 20, "nodes", None, True, seed=3), Shares(60, 20, 2), [(45, 60)]
    parts, layout = PartsCodec(Codec(values), shares), Layout(("head", "tail"), ((40,), (20,)), 20)
    owner = Owner(1, shares, vector, parts, constant(0.1))
    nodes = [Sparsifier(TopK(), 0.1, ErrorFeedback(), parts, 3, node=node, layout=layout) for node in (0, 1)]
    gradients = torch.randn(2, 60, generator=torch.Generator().manual_seed(0))
    for step in range(9):
        if step == 1:
            before, gradients[:, 45:] = owner.residual()[45:], 0.0
            assert before.any()
        payloads = [node.compress(gradient, step) for node, gradient in zip(nodes, gradients, strict=True)]
        owner.reduce([parts.parts(payload)[1] for payload in payloads], step, idle if step else [])
        owner.commit()
    assert torch.equal(owner.residual()[45:], before)


def test_damaged_parts_are_refused():
    """Every byte of a part and of what an owner passes on, and every way to cut them short."""
    loop = Loop(3, 300, 5, density=0.1)
    exchange = loop.exchange
    assert isinstance(exchange, AllReduced)
    payload = loop.nodes[0].compress(torch.randn(300, generator=generator("damage")), 0)
    codec = exchange.codec
    assert isinstance(codec, PartsCodec)
    whole = codec.decode(payload)
    part = codec.parts(payload)[1]
    for place in range(part.numel()):
        damaged = part.clone()
        damaged[place] ^= 0x55
        with pytest.raises(PayloadError):
            codec.decode_part(damaged, 1)
        if place:
            with pytest.raises(PayloadError):
                codec.decode_part(part[:place], 1)
    for place in range(24):  # the table of sizes
        damaged = payload.clone()
        damaged[place] ^= 0x80
        with pytest.raises(PayloadError):
            codec.decode(damaged)
    before = exchange.state()["owner_residual"]
    with pytest.raises(PayloadError):
        exchange.owners[1].reduce([part, damaged[:50], part], 0)
    assert torch.equal(exchange.state()["owner_residual"], before)
    assert torch.equal(codec.decode(payload).values, whole.values)


def owner_forgets(monkeypatch):
    """What an owner does not pass on is dropped."""
    real = Owner.reduce

    def reduce(self, *args):
        payload = real(self, *args)
        self.sparsifier.memory.residual.zero_()
        return payload

    monkeypatch.setattr(Owner, "reduce", reduce)


def owner_subtracts_what_it_meant(monkeypatch):
    """The rounding error of what an owner passes on is lost."""
    real = Codec.encode_with_decoded

    def encode(self, vector, rng=None):
        payload, _ = real(self, vector, rng)
        return payload, vector

    monkeypatch.setattr(Codec, "encode_with_decoded", encode)


def nodes_twice(monkeypatch):
    """Node 0 is counted twice."""
    real = InProcess.swap

    def swap(self, parts):
        return [[column[0], *column[:-1]] for column in real(self, parts)]

    monkeypatch.setattr(InProcess, "swap", swap)


@pytest.mark.parametrize("mistake", [owner_forgets, owner_subtracts_what_it_meant, nodes_twice])
def test_mistakes_are_noticed(mistake, monkeypatch):
    law = test_nothing_is_lost.hypothesis.inner_test
    case = {"codec": "4bit", "mean": "nodes", "memory": "ErrorFeedback", "size": 300, "nodes": 5, "density": 0.2,
            "owner_density": 0.1, "weighted": False, "seed": 1}  # fmt: skip
    law(**case)
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        law(**case)


def test_a_plain_remainder_would_burden_one_owner(monkeypatch):
    monkeypatch.setattr(
        Shares, "of", lambda self, positions: (positions % self.nodes, positions // self.nodes)
    )
    with pytest.raises(AssertionError):
        test_structure_does_not_fall_to_one_owner(64)


def test_any_rule_may_choose_at_the_nodes():
    loop = Loop(4, 2000)
    loop.nodes = [
        Sparsifier(RTopK(r_over_k=2), 0.05, ErrorFeedback(), loop.exchange.codec, 1, node=node)
        for node in range(4)
    ]
    moved, _ = loop.step(list(torch.randn(4, 2000, generator=generator("rule"))), 0)
    assert int((moved != 0).sum()) == 100


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("values", ["4bit", "2bit"])
def test_nothing_of_an_idle_tensor_is_lost_with_few_bits(values, in_parts):
    """Few bits have no zero: what is sent for an idle tensor counts if another rank used it, else it is undone."""
    layout = Layout(("weight", "bias", "last"), ((40,), (40,), (5,)), 45)
    vector = Vector(85, 45, "nodes", None, True, seed=3)
    codec = Codec(values, fixed=True, dense_size=45)
    exchange = make_exchange("all-gather", InProcess(1), vector, codec, constant(0.1))
    sparsifier = Sparsifier(TopK(), 0.1, ErrorFeedback(), codec, 3, layout=layout)
    group = Group(layout, sparsifier, exchange, torch.float32, torch.device("cpu"))
    gradient = torch.randn(85, generator=torch.Generator().manual_seed(0))
    for step, idle in enumerate([set(), {"last"}]):
        before = sparsifier.memory.residual.clone()
        group.begin(in_parts)
        group.put("weight", gradient[:40])
        group.put("bias", gradient[40:80])
        group.put("last", gradient[80:] * (not idle))
        sent = codec.decode(answer([group.stages(step, 1.0, idle)])[0]).to_dense()
        if not idle:
            group.commit()
    assert sent[80:].any()
    assert torch.allclose((sparsifier.memory.residual + sent)[80:], before[80:], atol=1e-6)
    assert not torch.equal(sparsifier.memory.residual[80:], before[80:])
    group.keep_idle({"last"})
    assert torch.equal(sparsifier.memory.residual[80:], before[80:])
    assert not torch.equal(sparsifier.memory.residual[:80], before[:80])
