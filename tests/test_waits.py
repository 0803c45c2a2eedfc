"""A round of the hook waits for its device once, whatever the backend, and O(k) bytes cross the bus."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from fake_device import FakeDevice, FakeTensor, unwrap

from rtopk import (
    Codec,
    DecayedErrorFeedback,
    ErrorFeedback,
    MomentumCorrection,
    RandomK,
    RTopK,
    Sparsifier,
    kernels,
)
from rtopk.kernels import device as triton_backend
from rtopk.kernels import plain
from rtopk.kernels.host import answer, ask, send
from rtopk.replicas import rounds
from rtopk.replicas.options import Options
from rtopk.replicas.rounds import Round
from rtopk.replicas.state import State
from rtopk.seed import generator
from rtopk.studies.bench import traffic
from rtopk.transport import AllGather, InFlight

SIZES = {"a.weight": (40, 30), "a.bias": (30,), "b.weight": (30, 50), "b.bias": (50,)}
DENSITY = 0.02
COUNTED = {}  # programs of triton that were launched


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["triton", "torch"])
def chosen(request, monkeypatch):
    """A backend that takes the fake device for a real one."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_order", [plain])
        monkeypatch.setattr(plain, "BLOCK", 500)
        monkeypatch.setattr(plain, "late", lambda vector: isinstance(vector, FakeTensor))
        return request.param
    pytest.importorskip("triton")
    launch = triton_backend._launch

    def unwrapped(name, like, programs, *arguments, **options):
        COUNTED[name] = COUNTED.get(name, 0) + 1
        launch(name, unwrap(like), programs, *map(unwrap, arguments), **options)

    monkeypatch.setattr(triton_backend, "_launch", unwrapped)
    monkeypatch.setattr(triton_backend, "serves", lambda *v: all(isinstance(x, FakeTensor) for x in v))
    monkeypatch.setattr(triton_backend, "BLOCK", 1024)
    monkeypatch.setattr(kernels, "_order", [triton_backend, plain])
    return request.param


def gradients(step, scale=1.0):
    rng = generator("waits", step)
    return {name: torch.randn(shape, generator=rng) ** 3 * scale for name, shape in SIZES.items()}


def run(steps, *, on=None, scales=None, scale=1.0, dtype=torch.float32, **options):
    """Run rounds of the engines' common part; return the gradients after each, and what each waited for."""
    make = on.tensor if on else torch.clone
    parameters = {name: make(torch.zeros(shape, dtype=dtype)) for name, shape in SIZES.items()}
    like = next(iter(parameters.values()))
    state = State(parameters, Options(density=DENSITY, **options).resolved(1), AllGather(None, like.device))
    state.set_scale(scale)
    made, costs = [], []
    for step in range(steps):
        drawn = gradients(step, (scales or {}).get(step, 1.0))
        fresh = {name: make(g.clamp(-6e4, 6e4).to(dtype)) for name, g in drawn.items()}
        if on:
            on.begin()
            COUNTED.clear()
        this = Round(state)
        for name, gradient in fresh.items():
            this.put(name, gradient)
        this.send(state.groups, set())
        this.finish(fresh)
        if on:
            costs.append((list(on.waits), on.down, on.up, state.groups[0].sparsifier.search.second_scans))
        made.append({name: unwrap(g).clone() for name, g in fresh.items()})
    return made, costs, state


def test_a_step_waits_once_and_moves_few_bytes(alone, chosen):
    expected, _, _ = run(6)
    with FakeDevice() as device:
        got, costs, state = run(6, on=device)
    for one, two in zip(expected, got, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    entries = state.groups[0].sparsifier.entries(state.layout.size, 0)
    # The first step has no guess: programs look at everything by themselves, plain torch looks again.
    assert len(costs[0][0]) == {"triton": 1, "torch": 2}[chosen]
    once = 0
    for (*_, missed), (waits, down, up, now_missed) in pairwise(costs):
        if chosen == "torch" and now_missed > missed:
            continue
        once += 1
        assert len(waits) == 1, waits
        assert down <= 12 * entries + 64  # positions and values
        assert up <= 8 * entries + 12 * entries  # the drawn ranks, and the mean
    assert once >= 3


@pytest.mark.parametrize("chosen", ["triton"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"memory": "momentum-correction"}, {"memory": DecayedErrorFeedback}])
def test_the_hook_adds_and_searches_in_one_pass(alone, chosen, options, monkeypatch):
    """In every step each entry is in one `sweep`, which adds, and notes candidates or, without a guess, checks."""
    launch, passes = triton_backend._launch, []

    def noted(name, like, programs, *arguments, **flags):
        if name == "sweep":
            begin, end = arguments[9:11]
            passes.append((end - begin, flags["ADDS"], flags["SEARCHES"]))
        launch(name, like, programs, *arguments, **flags)

    monkeypatch.setattr(triton_backend, "_launch", noted)
    with FakeDevice() as device:
        _, _, state = run(4, on=device, **options)
    assert all(adds for _, adds, _ in passes)
    assert sum(entries for entries, _, searches in passes if searches) == 4 * state.layout.size


@pytest.mark.parametrize("chosen", ["triton"], indirect=True)
@pytest.mark.parametrize(
    "way",
    [
        "compress, fp32 gradient",
        "compress, momentum correction",
        "the hook, fp32 gradient",
        "the hook, momentum correction",
    ],
)
def test_launches_are_those_of_the_model(alone, chosen, way):
    """Those of the table in docs/gpu.md, for as many tensors and ranks as there are here."""
    expected = sum(stage.launches for stage in traffic.STEPS[way])
    with FakeDevice() as device:
        if "hook" in way:
            expected -= 2 * (traffic.TENSORS - len(SIZES)) + 2 * (traffic.RANKS - 1)
            memory = "momentum-correction" if "momentum" in way else None
            run(3, on=device, selector=RTopK(r_over_k=5.0), memory=memory)
        else:
            memory = MomentumCorrection() if "momentum" in way else ErrorFeedback()
            node = Sparsifier(RTopK(r_over_k=5.0), DENSITY, memory)
            for step in range(2):
                gradient = device.tensor(torch.randn(5000, generator=generator(step)))
                device.begin()
                COUNTED.clear()
                node.compress(gradient, step)
    assert device.launches + sum(COUNTED.values()) == expected


def test_a_guess_that_fails(alone, chosen):
    """Too low, then too high. With programs that costs no wait; plain torch looks again, and waits once more."""
    jumps = {2: 1000.0, 4: 0.001}
    expected, _, _ = run(5, scales=jumps)
    with FakeDevice() as device:
        got, costs, _ = run(5, on=device, scales=jumps)
    for one, two in zip(expected, got, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    waited = [len(waits) for waits, *_ in costs[1:]]
    assert waited == [1] * 4 if chosen == "triton" else max(waited) == 2


def test_quantised_values_and_not_finite_gradients(alone, chosen):
    """int8 values go up once; a round that all skip puts everything back."""
    expected, _, plain_state = run(5, values="int8", scales={3: float("nan")})
    with FakeDevice() as device:
        got, costs, state = run(5, on=device, values="int8", scales={3: float("nan")})
        residual = unwrap(state.groups[0].sparsifier.memory.state_dict()["residual"])
    for one, two in zip(expected, got, strict=True):
        assert all(torch.equal(one[n], two[n]) or bool(two[n].isnan().all()) for n in one)
    assert torch.equal(residual, plain_state.groups[0].sparsifier.memory.state_dict()["residual"])
    assert state.skipped == plain_state.skipped == 1
    if chosen == "triton":
        assert [len(costs[step][0]) for step in (1, 2, 4)] == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_gradients_of_half_precision(alone, chosen, dtype):
    """Sums beyond the range of fp16 go back to the residual, on the device too."""
    scales = dict.fromkeys(range(5), 3e4)
    expected, _, plain_state = run(5, scales=scales, dtype=dtype)
    with FakeDevice() as device:
        got, costs, state = run(5, on=device, scales=scales, dtype=dtype)
        residual = unwrap(state.groups[0].sparsifier.memory.state_dict()["residual"])
    for one, two in zip(expected, got, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(residual, plain_state.groups[0].sparsifier.memory.state_dict()["residual"])
    if dtype == torch.float16:
        assert any(float(g.abs().max()) == 65504 for g in got[-1].values())
    if chosen == "triton":
        assert [len(waits) for waits, *_ in costs[1:]] == [1] * 4


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"memory": "momentum-correction"}, 1.0),
        ({}, 1024.0),
        pytest.param({"memory": partial(MomentumCorrection, nesterov=True)}, 3.0, marks=pytest.mark.slow),
        pytest.param({"memory": DecayedErrorFeedback}, 1.0, marks=pytest.mark.slow),
    ],
    ids=["momentum", "loss scale", "nesterov, loss scale", "decay"],
)
def test_a_memory_that_is_not_given_parts(alone, chosen, options, scale):
    """What is not finite is found by the selection, after it was added: the round goes back to its snapshot."""
    bad = {2: float("nan")}
    expected, _, plain_state = run(4, scales=bad, scale=scale, **options)
    with FakeDevice() as device:
        got, costs, state = run(4, on=device, scales=bad, scale=scale, **options)
        kept = {k: unwrap(v) for k, v in state.groups[0].sparsifier.memory.state_dict().items()}
    for one, two in zip(expected, got, strict=True):
        assert all(torch.equal(one[n], two[n]) or bool(two[n].isnan().all()) for n in one)
    assert state.skipped == plain_state.skipped == 1
    for name, tensor in plain_state.groups[0].sparsifier.memory.state_dict().items():
        assert torch.equal(kept[name], tensor)
    if chosen == "triton":
        assert [len(costs[step][0]) for step in (1, 3)] == [1, 1], costs


BUCKETS = ("a.bias", "b.weight", "b.bias"), ("a.weight",)  # the biases are sent in full


class OfAStranger:
    """A memory with the four functions that a memory must have, and candidates."""

    def __init__(self):
        self.residual = None

    def add(self, gradient, search=None):
        kernels.require_finite(gradient, "gradient")
        if self.residual is None:
            self.residual = kernels.zeros(gradient)
        kernels.accumulate_(self.residual, gradient, search)
        return self.residual

    def subtract(self, sent):
        kernels.subtract_(self.residual, sent.indices, sent.values)

    def state_dict(self):
        return {"residual": self.residual.clone()}

    def load_state_dict(self, state):
        self.residual = state["residual"].clone()


def run_buckets(steps, *, on=None, bad=(), before=None, scale=1.0, **options):
    """Run rounds of scope "bucket"; return gradients and memories after each, and the waits of each message.

    `bad` are a step, a tensor and what one of its entries is then; `before` is called before each step.
    """
    make = on.tensor if on else torch.clone
    parameters = {name: make(torch.zeros(shape)) for name, shape in SIZES.items()}
    transport = AllGather(None, parameters["a.weight"].device)
    options = {"density": DENSITY, "scope": "bucket", **options}
    state = State(parameters, Options(**options).resolved(1), transport)
    state.set_scale(scale)
    made, waits = [], []
    for step in range(steps):
        drawn = gradients(step)
        if bad and step == bad[0]:
            drawn[bad[1]].view(-1)[7] = bad[2]
        fresh = {name: make(gradient) for name, gradient in drawn.items()}
        if before:
            before(step, state)
        this = Round(state)
        for bucket in BUCKETS:
            if on:
                on.begin()
            for name in bucket:
                this.put(name, fresh[name])
            this.send([state.group_of[name] for name in bucket], set())
            if on:
                waits.append((step, list(on.waits)))
        if on:
            on.begin()
        this.finish(fresh)
        assert not on or not on.waits, on.waits
        kept = [tensor for group in state.groups for tensor in group.sparsifier.memory.state_dict().values()]
        made.append([unwrap(tensor).clone() for tensor in (*fresh.values(), *kept)])
    return made, waits, state


def check_same(expected, got):
    for one, two in zip(expected, got, strict=True):
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": "momentum-correction"},
        {"memory": DecayedErrorFeedback, "scale": 3.0, "values": "int8"},
        {"selector": RandomK()},
        {"density": 1.0},
        {"memory": "none"},
        {"exchange": "all-reduce"},
    ],
    ids=["default", "momentum", "decay, loss scale, int8", "random-k", "dense", "no memory", "all-reduce"],
)
def test_a_bucket_waits_once(alone, chosen, options):
    """For all its tensors, those that are sent in full too, and from the first step on if no guess is needed."""
    expected, _, _ = run_buckets(5, **options)
    with FakeDevice() as device:
        got, costs, state = run_buckets(5, on=device, **options)
    check_same(expected, got)
    misses = [group.sparsifier.search.second_scans for group in state.groups]
    needs_no_guess = "selector" in options or options.get("density") == 1.0
    assert len(costs) == 5 * len(BUCKETS)
    counts = [len(waits) for _, waits in costs]
    if chosen == "triton" or needs_no_guess:
        assert counts == [1] * len(counts), costs
    else:  # plain torch looks again where a guess has failed, for all tensors of a bucket together
        assert set(counts) <= {1, 2}
        assert counts.count(2) <= sum(misses)
        assert counts.count(1) >= 3


@pytest.mark.parametrize("options", [{"memory": OfAStranger}, {"selector": RTopK(nodes=2), "density": 0.9}])
def test_buckets_have_the_bits_of_the_cpu(alone, chosen, options):
    """Memories of strangers, which wait as they like, and r that is all or nearly all entries."""
    expected, _, _ = run_buckets(4, **options)
    with FakeDevice() as device:
        got, _, _ = run_buckets(4, on=device, **options)
    check_same(expected, got)


@pytest.mark.parametrize(
    ("memory", "where"),
    [
        *((None, where) for where in ("b.weight", "b.bias", "a.bias", "a.weight")),
        ("momentum-correction", "b.weight"),
        *(
            pytest.param(memory, where, marks=pytest.mark.slow)
            for memory in (DecayedErrorFeedback, "none", OfAStranger)
            for where in ("b.weight", "b.bias")
        ),
    ],
)
def test_a_bucket_with_one_tensor_that_is_not_finite(alone, chosen, memory, where):
    """Wherever it is, sent in full or not: its name is told, and all groups go back, those packed before it too."""
    bad, kept = (2, where, float("inf")), {}

    def remember(step, state):
        kept[step] = [group.sparsifier.memory.state_dict() for group in state.groups]

    expected, _, plain_state = run_buckets(4, bad=bad, memory=memory)
    with FakeDevice() as device:
        got, _, state = run_buckets(4, on=device, bad=bad, memory=memory, before=remember)
        for before, after in zip(kept[2], kept[3], strict=True):
            assert all(torch.equal(unwrap(before[kind]), unwrap(after[kind])) for kind in after)
    check_same(expected, got)
    assert state.skipped == plain_state.skipped == 1
    assert state.refusal == plain_state.refusal == f"step 2: the gradient of {where} is not finite on rank 0"


@pytest.mark.parametrize("where", ["fetch", "encode"])
def test_a_bucket_that_runs_out_of_memory_halfway(alone, chosen, monkeypatch, where):
    """After all groups were queued, or after the first was packed: the others learn of it, and all go back."""
    calls, told = {"left": -1}, []

    def failing(original):
        def call(*arguments, **options):
            calls["left"] -= 1
            if calls["left"] == 0:
                raise torch.OutOfMemoryError("halfway")
            return original(*arguments, **options)

        return call

    def arm(step, state):
        calls["left"] = {"fetch": 1, "encode": 2}[where] if step == 2 else -1

    monkeypatch.setattr(rounds, "raise_after_backward", told.append)
    if where == "fetch":
        monkeypatch.setattr("rtopk.kernels.host.fetch", failing(kernels.host.fetch))
    else:
        monkeypatch.setattr(Codec, "encode_with_decoded", failing(Codec.encode_with_decoded))
    with FakeDevice() as device:
        got, _, state = run_buckets(4, on=device, before=arm)
    assert [str(error) for error in told] == ["halfway"]
    assert state.step == 3
    monkeypatch.undo()
    half = len(SIZES)
    assert all(torch.equal(a, b) for a, b in zip(got[1][half:], got[2][half:], strict=True))
    assert all(bool(gradient.isnan().all()) for gradient in got[2][:half])


def test_what_several_ask_for_is_one_wait():
    """In any number of turns; results come in order, and an error ends those that still wait."""
    ended = []

    def asker(name, turns):
        try:
            total = 0
            for _ in range(turns):
                one, two = yield from ask(device.tensor(torch.tensor(1)), device.tensor(torch.tensor(10)))
                total += int(one) + int(two)
            if turns == 2:
                raise ValueError(name)
        finally:
            ended.append(name)
        return name, total

    with FakeDevice() as device:
        assert answer([asker("a", 1), asker("b", 3), asker("c", 0)]) == [("a", 11), ("b", 33), ("c", 0)]
        assert len(device.waits) == 3
        assert ended == ["c", "a", "b"]
        ended.clear()
        with pytest.raises(ValueError, match="b"):
            answer([asker("a", 4), asker("b", 2), asker("c", 1)])
        assert ended == ["c", "b", "a"]


OTHERS = {  # options, waits of a step: the table in docs/gpu.md
    "clipped": ({"clip_norm": 1.0}, 1 + 1),
    "idle": ({}, 1),
    "idle, momentum": ({"memory": "momentum-correction"}, 1),
    "verified": ({"verify_every": 1}, 1 + len(SIZES)),
}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["triton"], indirect=True)
@pytest.mark.parametrize("way", OTHERS)
def test_what_else_waits(alone, chosen, way):
    options, expected = OTHERS[way]
    idle = {"a.weight", "a.bias"} if "idle" in way else set()
    with FakeDevice() as device:
        parameters = {name: device.tensor(torch.zeros(shape)) for name, shape in SIZES.items()}
        transport = AllGather(None, parameters["a.weight"].device)
        state = State(parameters, Options(density=DENSITY, **options).resolved(1), transport)
        state.may_be_idle = bool(idle)
        for step in range(3):
            fresh = {name: device.tensor(g) for name, g in gradients(step).items()}
            device.begin()
            this = Round(state)
            for name in fresh.keys() - idle:
                this.put(name, fresh[name])
            this.send(state.groups, idle)
            this.finish(fresh)
            assert len(device.waits) == expected, device.waits


class Joined(ErrorFeedback):
    """Gradients are joined before they are added."""

    in_parts = False


class JoinedWithMomentum(MomentumCorrection):
    in_parts = False


def run_idle(*, on=None, **options):
    """Run rounds in which some tensors take no part; return gradients and memories after each, and waits."""
    make = on.tensor if on else torch.clone
    parameters = {name: make(torch.zeros(shape)) for name, shape in SIZES.items()}
    transport = AllGather(None, parameters["a.weight"].device)
    state = State(parameters, Options(density=DENSITY, **options).resolved(1), transport)
    state.may_be_idle = True
    made, waits = [], []
    for step, idle in enumerate((set(), {"a.weight", "a.bias"}, {"b.bias"}, set(), {"b.weight"}, set(SIZES))):
        before = state.state_dict()["memory"]
        drawn = gradients(step)
        fresh = {name: make(g * (name not in idle)) for name, g in drawn.items()}
        if on:
            on.begin()
        this = Round(state)
        for name, gradient in fresh.items():
            this.put(name, None if name in idle else gradient)
        this.send(state.groups, idle)
        this.finish(fresh)
        waits.append(list(on.waits) if on else [])
        after = state.state_dict()["memory"]
        kept = [unwrap(after[kind][name]).clone() for kind in after for name in SIZES]
        made.append([*(unwrap(g).clone() for g in fresh.values()), *kept])
        for kind in after:
            for name in idle:
                assert torch.equal(unwrap(before[kind][name]), unwrap(after[kind][name])), (step, kind, name)
    return made, waits


@pytest.mark.parametrize("memory", [None, "momentum-correction"])
@pytest.mark.parametrize("values", ["fp32", pytest.param("4bit", marks=pytest.mark.slow)])
def test_tensors_that_take_no_part_cost_no_wait(alone, chosen, memory, values):
    """What the memory holds of them stays, whatever few bits make of zero, as if gradients were joined first."""
    expected, _ = run_idle(memory=memory, values=values)
    check_same(run_idle(memory=JoinedWithMomentum if memory else Joined, values=values)[0], expected)
    with FakeDevice() as device:
        got, waits = run_idle(on=device, memory=memory, values=values)
    check_same(expected, got)
    if chosen == "triton":
        assert [len(counted) for counted in waits] == [1] * len(waits), waits


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["triton"], indirect=True)
@pytest.mark.parametrize(("memory", "most"), [(DecayedErrorFeedback, 1 + 5), (JoinedWithMomentum, 1 + 9)])
def test_tensors_that_take_no_part_where_gradients_are_joined(alone, chosen, memory, most):
    """The most that the table in docs/gpu.md says."""
    expected, _ = run_idle(memory=memory)
    with FakeDevice() as device:
        got, waits = run_idle(on=device, memory=memory)
    check_same(expected, got)
    assert max(len(counted) for counted in waits) == most, waits
    assert [len(waits[step]) for step in (0, 3)] == [1, 1], "all tensors took part"


class Lockstep(AllGather):
    """Ranks of one process that take turns: each sends before any of them waits. Payloads travel on `device`."""

    def __init__(self, rank, boards, nodes, device):
        self.rank, self.nodes, self.local = rank, nodes, range(rank, rank + 1)
        self.boards, self.device, self.number = boards, device, 0

    def start(self, payload):
        board = self.boards.setdefault(self.number, [None] * self.nodes)
        board[self.rank] = send(payload, self.device)
        self.number += 1
        return Arriving(board, payload)


class Arriving(InFlight):
    """A collective that is over once every rank has sent."""

    class Work:
        def wait(self):
            self.flight.arrived = torch.stack(self.flight.board)

    def __init__(self, board, payload):
        super().__init__(self.Work(), payload, board[0] if board[0] is not None else payload)
        self.work.flight, self.board = self, board


def run_ranks(steps, ranks, *, on=None, nccl=False, held_in=(), dtype=torch.float32, **options):
    """Run rounds of several ranks; return the gradients and residuals after each, and the last rank's waits."""
    make = on.tensor if on else torch.clone
    boards, states = {}, []  # what each rank sent, by the number of the collective
    for rank in range(ranks):
        parameters = {name: make(torch.zeros(shape, dtype=dtype)) for name, shape in SIZES.items()}
        like = next(iter(parameters.values()))
        transport = Lockstep(rank, boards, ranks, like.device if nccl else torch.device("cpu"))
        states.append(State(parameters, Options(**{"density": 0.005, **options}).resolved(ranks), transport))
    made, costs = [], []
    for step in range(steps):
        fresh = [
            {name: make(g.to(dtype)) for name, g in gradients((step, rank)).items()} for rank in range(ranks)
        ]
        held = {name: make(gradients("held")[name].to(dtype)) for name in held_in} if step == 2 else {}
        rounds = [Round(state) for state in states]
        for this, state, mine in zip(rounds, states, fresh, strict=True):
            if on:
                on.begin()
            for name, gradient in mine.items():
                this.put(name, gradient, held.get(name))
            for names in BUCKETS if options.get("scope") == "bucket" else [SIZES]:
                this.send(list(dict.fromkeys(state.group_of[name] for name in names)), set())
        sending = list(on.waits) if on else []
        for this, mine in zip(rounds, fresh, strict=True):
            if on:
                on.begin()
            this.finish(mine)
        if on:
            costs.append((sending, list(on.waits), on.up))
        kept = [t for group in states[-1].groups for t in group.sparsifier.memory.state_dict().values()]
        made.append([unwrap(tensor).clone() for tensor in (*fresh[0].values(), *fresh[-1].values(), *kept)])
    return made, costs, states[0]


WAYS = {  # over NCCL?, options; the biases, which every rank sends, are positions that all have in common
    "nccl": (True, {}),
    "nccl, buckets": (True, {"scope": "bucket"}),
    "gloo": (False, {}),
    "mean over the received": (False, {"memory": "none"}),
    "a second backward": (True, {"held_in": ("b.weight", "a.bias")}),
    "the density may change": (True, {"density": lambda step: 0.005}),
}


@pytest.mark.parametrize(
    "way", [*list(WAYS)[:2], *(pytest.param(way, marks=pytest.mark.slow) for way in list(WAYS)[2:])]
)
def test_ranks_average_on_the_device(chosen, way):
    """n k entries go up, and the mean in rank order has the host's bits; on NCCL what arrived is one more wait.

    That is one for all messages, if buckets have sent several.
    """
    nccl, options = WAYS[way]
    expected, _, _ = run_ranks(3, 3, **options)
    with FakeDevice() as device:
        got, costs, state = run_ranks(3, 3, on=device, nccl=nccl, **options)
    for one, two in zip(expected, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(two[: len(SIZES)], two[len(SIZES) :], strict=False))
    entries = sum(group.sparsifier.entries(group.layout.size, 0) for group in state.groups)
    messages = len(BUCKETS) if "scope" in options else 1
    for step, (sending, finishing, up) in list(enumerate(costs))[1:]:
        if chosen == "triton" and "memory" not in options:
            assert len(sending) == messages + ("density" in options), sending
        assert len(finishing) == nccl, finishing
        if not (step == 2 and "held_in" in options):
            assert up <= 3 * 12 * entries + 8 * (len(SIZES) + len(state.groups))


def test_what_arrived_on_a_device_is_copied_once():
    """As NCCL delivers it: one wait for the messages of all ranks, however often they are read."""

    class Done:
        def wait(self):
            pass

    with FakeDevice() as device:
        arrived = device.tensor(torch.arange(300, dtype=torch.uint8).view(3, 100))
        messages = InFlight(Done(), arrived[0], arrived).wait()
        assert [int(message[7]) for message in messages] == [7, 107, 207]
    assert (len(device.waits), device.down) == (1, 300)


@pytest.mark.parametrize(
    "read",
    [
        lambda there: there[torch.tensor([1, 2])],
        lambda there: there[there > 2],
        lambda there: there.unique_consecutive(),
        lambda there: there.repeat_interleave(there),
        lambda there: bool(there[0]),
        lambda there: there.to("cpu"),
        lambda there: there.copy_(torch.zeros(5, dtype=torch.int64)),
    ],
)
def test_the_simulated_device_notices_who_waits(read):
    with FakeDevice() as device:
        there = device.tensor(torch.arange(5))
        there.add_(1).sub_(1).clone()[there]
        assert not device.waits
        read(there)
        assert len(device.waits) == 1


def test_what_goes_to_host_memory_is_there():
    """Whoever gets it reads it at once: a copy that is still on its way would be sent as it is."""
    with FakeDevice() as device:
        there = device.tensor(torch.arange(5))
        assert send(there, torch.device("cpu")).tolist() == [0, 1, 2, 3, 4]
        assert (len(device.waits), device.down) == (1, 40)
        assert unwrap(send(torch.arange(3), torch.device("meta"))).tolist() == [0, 1, 2]
        assert len(device.waits) == 1


def test_the_sparse_all_reduce_waits_no_more(alone, chosen):
    """What owners keep and send lies in host memory."""
    expected, _, _ = run(4, exchange="all-reduce")
    with FakeDevice() as device:
        got, costs, _ = run(4, on=device, exchange="all-reduce")
    for one, two in zip(expected, got, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    if chosen == "triton":
        assert [len(waits) for waits, *_ in costs[1:]] == [1, 1, 1]
