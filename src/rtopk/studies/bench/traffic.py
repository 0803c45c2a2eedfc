"""What a step moves through the memory of an accelerator, and how long that takes at the least: a prediction.

Nothing here was run on a GPU. The bytes are counted by hand from the programs (tests/kernels/test_programs.py
counts those of the pass in its machine code); the time is bytes / bandwidth, plus a launch for every program, copy
and call of torch that works on the device (tests/test_waits.py counts them). A card reads memory in sectors, so an
entry that is read alone costs `SECTOR` bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

SIZES = (11_200_000, 66_000_000, 1_000_000_000)
BANDWIDTHS = (1.5, 2.0, 3.3)  # TB/s: A100 with 40 and 80 GB, H100
DENSITY, FACTOR = 0.001, 5.0  # k / d, and r / k
SECTOR = 32  # bytes
LAUNCH = 4e-6  # seconds between two programs that follow each other on a stream
SPARE = 1.05  # candidates for each of the r wanted, with a good guess

PCIE = 25e9  # bytes a second of a pinned copy over PCIe 4 x16
CALL = 10e-6  # seconds for such a copy to begin
RANKS = 8  # whose payloads a step of the hook averages
TENSORS = 60  # of a model
ENCODE = 4e-9  # seconds an entry takes to encode on a host: `rtopk bench codec`, docs/wire-format.md
DECODE = 3.3e-9  # seconds an entry takes to decode on a host: the same table
# Seconds an entry takes to decode, join with those of other ranks, add and write on a host: the `average` that
# `rtopk advise --measure` found, rtopk/tools/advise/reference.json.
RECEIVE = 22e-9
LANE = 0.25e9  # bytes a second that one thread of a card can put through a checksum whose every step needs the last


@dataclass(frozen=True)
class Stage:
    """A part of a step: the bytes it moves for every entry, candidate and entry sent, and its launches."""

    name: str
    entry: float = 0.0
    candidate: float = 0.0
    sent: float = 0.0
    launches: int = 1

    def bytes(self, d: int, density: float = DENSITY, factor: float = FACTOR) -> float:
        """Return the bytes that it moves for a vector of d entries."""
        k = density * d
        return self.entry * d + self.candidate * SPARE * factor * k + self.sent * k


MARKS = 1 / 8  # a bit for every entry
CHECKS = 3  # launches to find the smallest and the largest entry, and to copy both down
NOTES = 2 * MARKS  # set to zero, then written
SELECT = (
    Stage("candidates: read the bits, gather", entry=MARKS, candidate=SECTOR + 8, launches=2),
    Stage("r-th magnitude: three counts", candidate=12, launches=9),
    Stage("rank, take what was drawn, copy it down", candidate=4 + 8 + 12, sent=2 * SECTOR + 36, launches=10),
    Stage("subtract what was sent", sent=12 + 2 * SECTOR),
)
SORT = 8 * 2 * 8  # bytes for each entry: eight passes that read and write a position
# Of each entry that arrives: sort, find its place twice, add it there, divide, and write it into its gradient.
MEAN = SORT + 4 * 8 + (12 + 2 * SECTOR) + 8 + (SECTOR + 4) + (12 + SECTOR)


def average_stage(ranks: int) -> "Stage":
    """Return what averaging so many payloads moves, once their entries are on the device."""
    launches = 2 * ranks + 13 + TENSORS
    return Stage("average what arrived, write it", sent=ranks * MEAN, launches=launches)


REST = (
    Stage("add the tensors that are sent in full", launches=4),
    Stage("clear the gradient", entry=4),
    average_stage(RANKS),
)

STEPS: dict[str, tuple[Stage, ...]] = {
    "residual.add_(gradient)": (Stage("read two, write one", entry=12),),
    "compress, fp32 gradient": (
        Stage("check the gradient", entry=4, launches=CHECKS),
        Stage("accumulate and mark", entry=12 + NOTES, launches=2),
        *SELECT,
    ),
    "compress, bf16 gradient": (
        Stage("check the gradient", entry=2, launches=CHECKS),
        Stage("accumulate and mark", entry=10 + NOTES, launches=2),
        *SELECT,
    ),
    "compress, momentum correction": (
        Stage("check the gradient", entry=4, launches=CHECKS),
        Stage("accumulate and mark", entry=20 + NOTES, launches=2),
        *SELECT,
        Stage("clear the velocity of what was sent", sent=8 + SECTOR),
    ),
    "the hook, fp32 gradient": (
        Stage("put: accumulate, check and mark", entry=12 + NOTES, launches=1 + TENSORS),
        *SELECT,
        *REST,
    ),
    "the hook, momentum correction": (
        Stage("put: accumulate, check and mark", entry=20 + NOTES, launches=1 + TENSORS),
        *SELECT,
        Stage("clear the velocity of what was sent", sent=8 + SECTOR),
        *REST,
    ),
}


@dataclass(frozen=True)
class TrafficRow:
    """One way to do a step, at one size."""

    step: str
    d: int
    bytes_per_entry: float
    launches: int
    ms: dict[float, float]  # by TB/s


def predict(sizes: tuple[int, ...] = SIZES) -> Iterator[TrafficRow]:
    """Yield a row for each way and size."""
    for name, stages in STEPS.items():
        for d in sizes:
            moved = sum(stage.bytes(d) for stage in stages)
            launches = sum(stage.launches for stage in stages)
            ms = {rate: 1e3 * (moved / (rate * 1e12) + launches * LAUNCH) for rate in BANDWIDTHS}
            yield TrafficRow(name, d, moved / d, launches, ms)


def packing(k: int, bytes_per_entry: float = 5.0) -> dict[str, float]:
    """Return the milliseconds to a payload of k entries, coded on the host and on the device.

    On the host: copy positions and values down, encode, copy the payload up for NCCL. On the device: the checksum,
    which is one chain of operations over the payload, done by one thread; what else coding takes is left out, and
    so is the wait for the status of the step, which the host needs in both cases.
    """
    payload = bytes_per_entry * k
    host = 2 * CALL + (12 * k + payload) / PCIE + ENCODE * k
    return {"host": 1e3 * host, "device": 1e3 * payload / LANE}


def averaging(k: int, ranks: int, bytes_per_entry: float = 5.0) -> dict[str, float]:
    """Return the milliseconds from the payloads of all ranks to gradients, by where the work is done.

    host: decode and average there, copy the mean up. entries: decode on the host, copy the entries up, average on
    the device (at 2 TB/s). payloads: all on the device, where decoding takes at least the checksum, by one thread
    for each payload; reading codes and values, which can go on beside it, is left out, and so are copies.
    """
    arrived = ranks * k
    copied = 2 * CALL + 12 * arrived / PCIE
    stage = average_stage(ranks)
    device = stage.sent * k / 2e12 + stage.launches * LAUNCH
    return {
        "host": 1e3 * (RECEIVE * arrived + copied + TENSORS * LAUNCH),
        "entries": 1e3 * (DECODE * arrived + copied + device),
        "payloads": 1e3 * (bytes_per_entry * k / LANE + device),
    }


def table(sizes: tuple[int, ...] = SIZES) -> list[list[str]]:
    """Return the rows of the table in docs/gpu.md, heads first."""
    heads = ["step", "entries", "bytes per entry", "launches", *(f"ms at {rate} TB/s" for rate in BANDWIDTHS)]
    rows = [
        [row.step, f"{row.d / 1e6:,.0f} M", f"{row.bytes_per_entry:.1f}", f"{row.launches}"]
        + [f"{row.ms[rate]:.2f}" for rate in BANDWIDTHS]
        for row in predict(sizes)
    ]
    return [heads, *rows]


def packing_table(sizes: tuple[int, ...] = SIZES) -> list[list[str]]:
    """Return where packing is faster, by the model, heads first."""
    rows = []
    for d in sizes:
        k = round(DENSITY * d)
        found = packing(k)
        rows.append([f"{d / 1e6:,.0f} M", f"{k:,}", f"{found['host']:.2f}", f"{found['device']:.2f}"])
    return [["entries", "sent", "ms, on the host", "ms, checksum on the device alone"], *rows]


def averaging_table(
    sizes: tuple[int, ...] = SIZES[:2], ranks: tuple[int, ...] = (2, 8, 32)
) -> list[list[str]]:
    """Return where averaging is faster, by the model, heads first."""
    heads = [
        "entries",
        "ranks",
        "ms, all on the host",
        "ms, averaged on the device",
        "ms, decoded there too, at least",
    ]
    rows = []
    for d in sizes:
        for number in ranks:
            found = averaging(round(DENSITY * d), number)
            rows.append([f"{d / 1e6:,.0f} M", f"{number}", *(f"{ms:.2f}" for ms in found.values())])
    return [heads, *rows]
