"""How much a node receives as nodes are added: the two exchanges beside PowerSGD, Ok-Topk's bound and dense.

Every node takes a real gradient, draws its entries as the hook does and encodes them; our bytes are those of the
messages that would arrive at a node. Sixteen batches give the gradients in turn; draws differ between all nodes.
Nodes are visited one after the other, so only what they send is held.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rtopk.aggregate import Mean
from rtopk.codec import Codec
from rtopk.exchange import NOTE_BYTES, AllReduced, Vector
from rtopk.layout import Layout
from rtopk.memory import NoMemory
from rtopk.replicas.control import SIZE as CONTROL_BYTES
from rtopk.schedule import constant
from rtopk.seed import generator
from rtopk.select import RTopK
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier
from rtopk.studies.bench import make_model
from rtopk.tools.show.palette import style
from rtopk.tools.show.terminal import save_picture
from rtopk.transport import InProcess

BATCHES = 16
STATUS = 1  # byte of what an owner passes on


@dataclass(frozen=True)
class ExchangePlan:
    """What to count."""

    models: tuple[str, ...] = ("resnet18", "lstm1500")
    nodes: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256)
    densities: tuple[float, ...] = (0.01, 0.001)
    values: str = "fp32"
    mean: Mean = "nodes"


QUICK = ExchangePlan(models=("small",), nodes=(2, 8, 32))


@dataclass(frozen=True)
class ExchangeRow:
    """Bytes that a node receives in a step."""

    model: str
    size: int  # d
    density: float
    nodes: int
    all_reduce: float  # mean over the nodes
    fullest: float  # the largest sum of parts that arrives at an owner, over the mean
    all_gather: float
    powersgd: float  # of rank 1
    ok_topk: float  # the bound of Ok-Topk, 6 k (n - 1) / n words of 4 bytes
    dense: float


def count(plan: ExchangePlan, tell: Callable[[str], None] = lambda text: None) -> Iterator[ExchangeRow]:
    """Count every model, density and number of nodes."""
    for name in plan.models:
        model, loss = make_model(name)
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        layout = Layout.of(named.items())
        chosen: dict[float, dict[int, SparseVector]] = {density: {} for density in plan.densities}
        most = max(plan.nodes)
        for batch in range(min(BATCHES, most)):
            tell(f"{name}: gradient {batch + 1} of {min(BATCHES, most)}")
            found = torch.autograd.grad(loss(model, generator("exchange", name, batch)), list(named.values()))
            gradient = layout.flatten(dict(zip(named, found, strict=True)))
            for density in plan.densities:
                by_node = {
                    node: _choose(gradient, density, node, layout) for node in range(batch, most, BATCHES)
                }
                chosen[density] |= by_node
        for density in plan.densities:
            for nodes in plan.nodes:
                tell(f"{name}, {100 * density:g} %: {nodes} nodes")
                yield _row(plan, name, layout, density, [chosen[density][node] for node in range(nodes)])


def _choose(gradient: Tensor, density: float, node: int, layout: Layout) -> SparseVector:
    """Return what a node sends in a first step."""
    sent: list[SparseVector] = []
    sparsifier = Sparsifier(
        RTopK(r_over_k=2),
        density,
        NoMemory(),
        Codec(fingerprint=layout.fingerprint),
        node=node,
        layout=layout,
    )
    sparsifier.watch = sent.append
    sparsifier.compress(gradient, 0)
    return sent[0]


def _row(
    plan: ExchangePlan, model: str, layout: Layout, density: float, vectors: Sequence[SparseVector]
) -> ExchangeRow:
    nodes, size, tail = len(vectors), layout.size, layout.dense_size
    vector = Vector(size, tail, plan.mean, None, keeps=False, seed=0)
    codec = Codec(plan.values, fingerprint=layout.fingerprint, fixed=True, dense_size=tail)
    reduced = AllReduced(InProcess(nodes), vector, codec, constant(density))
    payloads = [reduced.codec.encode(chosen) for chosen in vectors]
    _, traffic = reduced.mean(payloads, 0)
    parts = torch.tensor([[part.numel() for part in reduced.codec.parts(payload)] for payload in payloads])
    arrives = parts.sum(0).double()  # (n,) at each owner
    gathered = statistics.mean(codec.capacity(size, len(chosen)) for chosen in vectors) + CONTROL_BYTES
    ring = 2 * (nodes - 1) / nodes
    return ExchangeRow(
        model, size, density, nodes,
        all_reduce=traffic.received + (nodes - 1) * (NOTE_BYTES + STATUS),
        fullest=float(arrives.max() / arrives.mean()),
        all_gather=(nodes - 1) * gathered,
        powersgd=4 * ring * _low_rank(layout.shapes),
        ok_topk=4 * 3 * ring * len(vectors[0]),
        dense=4 * ring * size,
    )  # fmt: skip


def _low_rank(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the entries of PowerSGD's factors of rank 1; tensors of one dimension are sent whole."""
    return sum(
        shape[0] + torch.Size(shape).numel() // shape[0] if len(shape) > 1 else shape[0] for shape in shapes
    )


HEADS = ["nodes", "all-reduce", "fullest owner", "all-gather", "powersgd-1", "Ok-Topk's bound", "dense"]


def cells(row: ExchangeRow) -> list[str]:
    """Return a line of the table, in kB."""
    sizes = (row.all_gather, row.powersgd, row.ok_topk, row.dense)
    kilobytes = [f"{size / 1e3:,.1f}" for size in sizes]
    return [str(row.nodes), f"{row.all_reduce / 1e3:,.1f}", f"{row.fullest:.3f}", *kilobytes]


def panels(rows: Sequence[ExchangeRow]) -> dict[str, list[ExchangeRow]]:
    """Sort rows by model and density."""
    found: dict[str, list[ExchangeRow]] = {}
    for row in rows:
        found.setdefault(f"{row.model} ({row.size / 1e6:.1f} M), {100 * row.density:g} %", []).append(row)
    return found


def draw(rows: Sequence[ExchangeRow], path: Path) -> None:
    """Draw what a node receives against the number of nodes, a panel for each model and density."""
    from matplotlib.figure import Figure

    lines: Mapping[str, tuple[str, str, str]] = {
        "all_reduce": ("rtopk, all-reduce", style("rtop-k")[0], "-"),
        "all_gather": ("rtopk, all-gather", style("rtop-k")[0], "--"),
        "powersgd": ("PowerSGD of rank 1", style("powersgd")[0], "-"),
        "ok_topk": ("bound of Ok-Topk", style("top-k")[0], ":"),
        "dense": ("dense", style("dense")[0], "-"),
    }
    shown = panels(rows)
    figure = Figure(figsize=(3.4 * len(shown) + 1, 3.8), layout="constrained")
    for axis, (title, found) in zip(
        figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True
    ):
        for name, (label, colour, dashes) in lines.items():
            sizes = [getattr(row, name) / 1e6 for row in found]
            axis.plot([row.nodes for row in found], sizes, dashes, color=colour, label=label, marker=".")
        axis.set(xscale="log", yscale="log", xlabel="nodes", ylabel="MB that a node receives in a step")
        axis.set_xticks([row.nodes for row in found], [str(row.nodes) for row in found])
        axis.minorticks_off()
        axis.set_title(title, size=9)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    save_picture(figure, path)
