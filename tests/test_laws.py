"""Laws that every selector, memory and codec keeps. A new variant is added in laws.py and inherits them."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laws
from rtopk import Codec, ErrorFeedback, Layout, NoMemory, RandomK, SparseVector, Sparsifier, TopK
from rtopk.seed import generator

VARIANTS = laws.every_variant()
pytestmark = pytest.mark.usefixtures("every_backend")


def build(selector, memory, codec):
    return laws.SELECTORS[selector](), laws.MEMORIES[memory](), laws.CODECS[codec]()


@pytest.mark.parametrize(("selector", "memory", "codec"), [v for v in VARIANTS if v[1] != "NoMemory"])
@settings(max_examples=10)
@given(
    size=st.integers(1, 300),
    steps=st.integers(1, 12),
    density=st.sampled_from([0.001, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**40),
)
def test_nothing_is_lost(selector, memory, codec, size, steps, density, seed):
    laws.nothing_lost(*build(selector, memory, codec), size, steps, density, seed)


@pytest.mark.parametrize(("selector", "memory", "codec"), [v for v in VARIANTS if v[2] in laws.LOSSLESS])
def test_density_1_is_the_identity(selector, memory, codec):
    laws.density_1_is_the_identity(*build(selector, memory, codec))


@pytest.mark.parametrize(("selector", "memory", "codec"), VARIANTS)
def test_arguments_are_untouched(selector, memory, codec):
    laws.arguments_untouched(*build(selector, memory, codec))


def test_draw_is_without_replacement():
    laws.draws_without_replacement()


def test_nobody_is_dealt_the_same():
    laws.nobody_is_dealt_the_same()


def test_who_was_not_sent_waits_on():
    laws.who_was_not_sent_waits_on()


def test_masked_velocity_is_forgotten():
    laws.masked_velocity_is_forgotten()


def test_quantisation_error_stays():
    laws.quantisation_error_stays()


@pytest.mark.parametrize("codec", laws.LOSSLESS)
@given(size=st.integers(1, 400), seed=st.integers(0, 1000), data=st.data())
def test_lossless_codec_gives_back_what_it_got(codec, size, seed, data):
    k = data.draw(st.integers(0, size))
    rng = generator(seed)
    vector = SparseVector(
        torch.randperm(size, generator=rng)[:k].sort().values, torch.randn(k, generator=rng), size
    )
    codec = laws.CODECS[codec]()
    payload, decoded = codec.encode_with_decoded(vector)
    again = codec.decode(payload)
    for other in (decoded, again):
        assert torch.equal(other.indices, vector.indices)
        assert torch.equal(other.values, vector.values)
        assert other.size == size


@pytest.mark.parametrize(("selector", "memory", "codec"), VARIANTS)
def test_state_survives_a_file_and_a_new_process(selector, memory, codec):
    def run(node, first, last):
        return [
            node.compress(g, step)
            for step, g in enumerate(laws.gradients(150, last, seed=3))
            if step >= first
        ]

    whole = run(Sparsifier(*_ordered(selector, memory, codec)), 0, 8)
    node = Sparsifier(*_ordered(selector, memory, codec))
    run(node, 0, 4)
    file = io.BytesIO()
    torch.save(node.state_dict(), file)
    file.seek(0)
    resumed = Sparsifier(*_ordered(selector, memory, codec))
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for a, b in zip(run(resumed, 4, 8), whole[4:], strict=True):
        assert torch.equal(a, b)


def _ordered(selector, memory, codec):
    selector, memory, codec = build(selector, memory, codec)
    return selector, 0.1, memory, codec


def test_nodes_and_steps_draw_differently_and_repeat():
    gradient = torch.ones(1000)

    def drawn(node, step):
        return tuple(
            Codec()
            .decode(Sparsifier(RandomK(), 0.01, NoMemory(), node=node).compress(gradient, step))
            .indices.tolist()
        )

    sets = {drawn(node, step) for node in range(3) for step in range(3)}
    assert len(sets) == 9
    assert drawn(1, 2) == drawn(1, 2)


@pytest.mark.parametrize("selector", ["RTopK", "RAgeK"])
@pytest.mark.parametrize("memory", [m for m in laws.MEMORIES if m != "NoMemory"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_refused_gradient_changes_nothing(selector, memory, bad):
    node = Sparsifier(laws.SELECTORS[selector](), 0.1, laws.MEMORIES[memory]())
    for step, gradient in enumerate(laws.gradients(100, 3, seed=1)):
        node.compress(gradient, step)
    before = node.state_dict()
    wrong = torch.zeros(100 if bad != 1.0 else 101)
    wrong[60] = bad
    with pytest.raises(ValueError, match="gradient must"):
        node.compress(wrong, 3)
    after = node.state_dict()
    for part in ("memory", "seat"):
        assert all(torch.equal(before[part][name], after[part][name]) for name in before.get(part, {}))


def test_dense_tail_is_always_sent_whole():
    model = torch.nn.Linear(40, 25)
    layout = Layout.of(model)
    node = Sparsifier(TopK(), 0.01, ErrorFeedback(), layout=layout)
    gradient = torch.randn(layout.size, generator=generator(0))
    vector = node.codec.decode(node.compress(gradient, 0))
    assert len(vector) == 10 + 25
    assert torch.equal(vector.indices[10:], torch.arange(1000, 1025))
    assert not node.memory.residual[1000:].any()


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, float("nan")])
def test_density_is_checked(density):
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got"):
        Sparsifier(TopK(), density)
