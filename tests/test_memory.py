"""Memories on their own: arithmetic by hand, dtypes, states that do not fit."""

import math

import pytest
import torch

from rtopk import (
    Codec,
    ErrorFeedback,
    Layout,
    MomentumCorrection,
    NoMemory,
    RTopK,
    SparseVector,
    Sparsifier,
    kernels,
)
from rtopk.kernels import draws
from rtopk.kernels.search import Pending, Search
from rtopk.memory import clip


def sparse(indices, values, size):
    return SparseVector(torch.tensor(indices), torch.tensor(values), size)


def test_error_feedback_by_hand():
    memory = ErrorFeedback()
    assert memory.add(torch.tensor([3.0, 1.0])).tolist() == [3.0, 1.0]
    memory.subtract(sparse([0], [2.5], 2))
    assert memory.add(torch.tensor([1.0, 1.0])).tolist() == [1.5, 2.0]


def test_no_memory_forgets():
    memory = NoMemory()
    gradient = torch.tensor([3.0, 1.0])
    memory.add(gradient)
    memory.subtract(sparse([0], [3.0], 2))
    assert memory.add(gradient) is gradient
    assert memory.state_dict() == {}


def test_momentum_correction_by_hand():
    memory = MomentumCorrection(momentum=0.5)
    assert memory.add(torch.tensor([4.0, 2.0])).tolist() == [4.0, 2.0]
    memory.subtract(sparse([0], [4.0], 2))
    # entry 0: velocity masked; entry 1: velocity 1 + 1, residual 2 + 2
    assert memory.add(torch.tensor([1.0, 1.0])).tolist() == [1.0, 4.0]
    assert memory.velocity.tolist() == [1.0, 2.0]


def test_nesterov_is_torchs():
    """With everything sent and nothing masked, what comes out is the step of torch's SGD."""
    memory = MomentumCorrection(0.9, masking=False, nesterov=True)
    weight, total = torch.zeros(50, requires_grad=True), torch.zeros(50)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=True)
    for step in range(6):
        weight.grad = torch.randn(50, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        vector = memory.add(weight.grad.clone()).clone()
        total -= vector
        memory.subtract(SparseVector(torch.arange(50), vector, 50))
        assert torch.allclose(total, weight.detach(), atol=1e-5)


def test_a_gradient_whose_square_overflows_is_clipped_to_the_limit():
    huge = torch.full((100,), 1e30)
    assert torch.linalg.vector_norm(clip(huge, 2.0)).item() == pytest.approx(2.0)
    assert not clip(torch.tensor([1.0, math.inf]), 2.0).isfinite().all()  # for the memory to refuse


def test_local_clipping_bounds_what_is_added():
    memory = MomentumCorrection(momentum=0.9, clip_norm=5.0)
    assert torch.allclose(memory.add(torch.tensor([30.0, 40.0])), torch.tensor([3.0, 4.0]))
    short = MomentumCorrection(momentum=0.9, clip_norm=5.0)
    assert short.add(torch.tensor([0.3, 0.4])).tolist() == torch.tensor([0.3, 0.4]).tolist()
    zero = MomentumCorrection(clip_norm=1.0)
    assert zero.add(torch.zeros(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("memory", [ErrorFeedback, MomentumCorrection])
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_half_precision_is_accumulated_in_fp32(memory, dtype, kept):
    memory = memory()
    assert memory.add(torch.ones(4, dtype=dtype)).dtype == kept


@pytest.mark.parametrize("memory", [ErrorFeedback, MomentumCorrection])
def test_many_tiny_halves_are_not_lost(memory):
    memory = memory(0.0) if memory is MomentumCorrection else memory()
    for _ in range(1000):
        memory.add(torch.full((3,), 0.001, dtype=torch.bfloat16))
    step = float(torch.tensor(0.001, dtype=torch.bfloat16))
    assert torch.allclose(memory.residual, torch.full((3,), 1000 * step), rtol=1e-4)


@pytest.mark.parametrize("memory", [ErrorFeedback, MomentumCorrection])
def test_gradient_that_is_a_view_with_a_stride(memory):
    column = torch.arange(12.0).view(4, 3)[:, 1]
    assert memory().add(column).tolist() == [1.0, 4.0, 7.0, 10.0]


@pytest.mark.parametrize("memory", [ErrorFeedback, MomentumCorrection])
def test_states_that_do_not_fit_are_refused_and_change_nothing(memory):
    memory = memory()
    memory.add(torch.ones(4))
    before = memory.state_dict()
    for state, message in (
        ({"residual": torch.ones(5), "velocity": torch.ones(5)}, "shape|hold"),
        ({"something": torch.ones(4)}, "must hold"),
        ({name: torch.full((4,), math.nan) for name in before}, "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            memory.load_state_dict(state)
    after = memory.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_state_is_a_copy_both_ways():
    memory = ErrorFeedback()
    memory.add(torch.ones(3))
    state = memory.state_dict()
    memory.add(torch.ones(3))
    assert state["residual"].tolist() == [1.0, 1.0, 1.0]
    other = ErrorFeedback()
    other.load_state_dict(state)
    other.add(torch.ones(3))
    assert state["residual"].tolist() == [1.0, 1.0, 1.0]


def test_empty_state_is_that_of_a_new_memory():
    memory = ErrorFeedback()
    memory.load_state_dict({})
    assert memory.residual is None
    with pytest.raises(ValueError, match="holds nothing yet"):
        memory.subtract(sparse([0], [1.0], 3))


@pytest.mark.parametrize(
    "options", [{"momentum": 1.0}, {"momentum": -0.1}, {"clip_norm": 0.0}, {"clip_norm": -1.0}]
)
def test_momentum_correction_checks_its_options(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name} must"):
        MomentumCorrection(**options)


def put(memory, gradient, search=None):
    """Give the memory the gradient in three parts, so that the step can be taken back; return what to send from."""
    memory.snapshot()
    for begin, end in ((0, 300), (700, gradient.numel()), (300, 700)):
        memory.put(begin, gradient[begin:end])
    return memory.add(None, search)


def put_and_pick(memory, gradient, search):
    """Put a gradient that is not finite: the memory finds out, or on a device selection, and the hook goes back."""
    put(memory, gradient, search)
    kernels.pick(search.found, 1, draws.every_bit(1), 1)


@pytest.mark.parametrize("search", [None, (2.5, 300, 900), (0.0, 300), (0.5,)])
def test_a_gradient_in_parts_is_the_same_as_a_whole_one(search):
    rng = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 1000, generator=rng)
    plain, swapped = ErrorFeedback(), ErrorFeedback()
    for memory in (plain, swapped):
        memory.add(first)
        memory.subtract(sparse([3, 7], [first[3].item(), 0.5], 1000))
    old = swapped.residual
    kept = old.clone()
    looks = [None, None] if search is None else [Search(*search), Search(*search)]
    expected = plain.add(second, looks[0])
    residual = put(swapped, second, looks[1])
    assert residual is swapped.residual
    assert torch.equal(residual, expected)
    assert torch.equal(old, kept), "the old residual is the way back"
    if search:
        assert torch.equal(looks[1].found.positions, looks[0].found.positions)
    swapped.restore({"residual": old})
    assert swapped.residual is old


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 500, 899, 900, 999])
@pytest.mark.parametrize("search", [None, (3.0, 100, 900), (0.0, 100, 900), (3.0, 100)])
def test_a_sum_that_is_not_finite_is_refused_wherever_it_is(bad, place, search):
    memory = ErrorFeedback()
    memory.add(torch.linspace(-4.0, 4.0, 1000))
    old, kept = memory.residual, memory.residual.clone()
    gradient = torch.zeros(1000)
    gradient[place] = bad
    look = search and Search(*search)
    with pytest.raises(ValueError, match=f"residual \\+ gradient must be finite, got .* at index {place}"):
        put_and_pick(memory, gradient, look)
    if look and isinstance(look.found, Pending):
        memory.restore({"residual": old})
    assert memory.residual is old
    assert torch.equal(old, kept)


def test_sums_that_overflow_are_refused():
    memory = ErrorFeedback()
    memory.add(torch.full((1000,), 3e38))
    with pytest.raises(ValueError, match="at index 0"):
        put_and_pick(memory, torch.full((1000,), 3e38), Search(1.0, 5))


def test_payloads_of_parts_are_the_payloads_of_gradients():
    rng = torch.Generator().manual_seed(2)
    layout = Layout(("w", "b"), ((4900,), (100,)), 100)
    nodes = [Sparsifier(RTopK(nodes=5), 0.01, codec=Codec(values="fp16"), layout=layout) for _ in range(2)]
    for node in nodes:
        node.memory.add(torch.zeros(5000))
    for step in range(20):
        gradient = torch.randn(5000, generator=rng) * 10.0 ** (step % 3)
        nodes[1].memory.snapshot()
        for begin in (2500, 0):
            nodes[1].memory.put(begin, gradient[begin : begin + 2500])
        assert torch.equal(nodes[0].compress(gradient, step), nodes[1].compress(None, step))
        assert torch.equal(nodes[0].memory.residual, nodes[1].memory.residual)


def test_a_memory_that_starts_over_with_another_size_forgets_its_second_buffer():
    memory = ErrorFeedback()
    memory.add(torch.ones(1000))
    put(memory, torch.ones(1000))
    memory.snapshot()
    memory.load_state_dict({})
    memory.add(torch.ones(1200))
    assert torch.equal(put(memory, torch.ones(1200)), torch.full((1200,), 2.0))


def test_snapshots_in_turn_with_refusals_and_steps_back():
    """Two buffers change places; whatever happens in between, a step back is exact and a step forward is plain."""
    rng = torch.Generator().manual_seed(3)
    memory, plain = ErrorFeedback(), ErrorFeedback()
    for each in (memory, plain):
        each.add(torch.zeros(1000))
    for step in range(30):
        gradient = torch.randn(1000, generator=rng)
        before = memory.state_dict()
        snapshot = memory.snapshot()
        if step % 7 == 3:
            with pytest.raises(ValueError, match="finite"):
                memory.add(gradient * math.inf)
        vector = put(memory, gradient) if step % 2 else memory.add(gradient)
        sent = sparse([1, 500, 999], vector[[1, 500, 999]].tolist(), 1000)
        memory.subtract(sent)
        if step % 5 == 0:
            memory.restore(snapshot)
            assert torch.equal(memory.residual, before["residual"])
        else:
            plain.add(gradient)
            plain.subtract(sent)
        assert torch.equal(memory.residual, plain.residual)
