"""States on disk: one file per rank, replaced atomically, with a checksum; and a change of the world size.

Each rank has its own residual, so each saves its own file. If the number of ranks changes from n to m, the mean
over ranks makes the model receive 1/n of the residuals' sum from the old job and 1/m from the new one; so rank j
of the new job takes (m / n) times the sum of the old ranks j, j + m, j + 2m, ...
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rtopk.exchange import OWNER
from rtopk.replicas.control import by_rank
from rtopk.state_file import Format, StateError, byte_tensor, digest, write_atomically
from rtopk.transport import AllGather

if TYPE_CHECKING:
    from rtopk.replicas.state import State

FORMAT = 1
FILE = Format(b"rtopk-state-1\n", 32, "use an older checkpoint")
KEYS = {"format", "rank", "world_size", "fingerprint", "seed", "step", "epoch", "memory"}


def file_name(rank: int | str, world_size: int | str, shard: str = "") -> str:
    """Name the file of a rank, which may hold a part of the model."""
    part = f"-shard-{shard.replace(' ', '-')}" if shard else ""
    return f"rtopk-rank{rank}-of-{world_size}{part}.state"


def save(state: Mapping[str, Any], directory: Path) -> Path:
    """Write one rank's state so that a reader sees the old file or the new one, never half of one."""
    path = directory / file_name(state["rank"], state["world_size"], state.get("shard", ""))
    write_atomically(path, FILE.pack(state))
    return path


def read(path: Path) -> dict[str, Any]:
    """Read a file of `save`; StateError if it is truncated, altered or something else."""
    return FILE.unpack(path.read_bytes(), str(path))


def read_rank(directory: Path, rank: int, size: int, shard: str = "") -> dict[str, Any]:
    """Read the file of a rank; StateError if it holds the state of another rank."""
    path = directory / file_name(rank, size, shard)
    state = read(path)
    _expect(state, rank, size, f"{path}: the file of rank {rank}")
    return state


def _expect(state: Mapping[str, Any], rank: int, size: int, what: str) -> None:
    if (state.get("rank"), state.get("world_size")) != (rank, size):
        raise StateError(
            f"{what} holds the state of rank {state.get('rank')} of {state.get('world_size')}, expected rank "
            f"{rank} of {size}; a residual would be lost and another counted twice, use an older checkpoint"
        )


def fits(state: Mapping[str, Any], own: "State", *, any_rank: bool = False) -> None:
    """Raise StateError unless a state belongs to this model, seed and (unless `any_rank`) rank."""
    missing = KEYS - set(state)
    if missing or state["format"] != FORMAT:
        raise StateError(
            f"not a state of format {FORMAT}: format {state.get('format')}, missing {sorted(missing)}"
        )
    if state.get("shard", "") != own.shard:
        raise StateError(
            f"the state is of shard {state.get('shard') or '0 of 1'}, this rank holds {own.shard or '0 of 1'}; "
            "another number of shards goes on from torch.distributed.checkpoint: state.sharded()"
        )
    fingerprint = f"{own.layout.fingerprint:016x}"
    if state["fingerprint"] != fingerprint:
        raise StateError(
            f"the state is of another model: layout {state['fingerprint']}, this one has {fingerprint} "
            "(names, shapes, what is trainable and what is sent dense must be the same)"
        )
    if state["seed"] != own.options.seed:
        raise StateError(f"the state is of seed {state['seed']}, this job has seed {own.options.seed}")
    if any_rank:
        return
    if state["world_size"] != own.world_size:
        raise StateError(
            f"the state is of {state['world_size']} ranks, this job has {own.world_size}; "
            "use load(directory), which hands residuals over to another number of ranks"
        )
    if state["rank"] != own.rank:
        raise StateError(
            f"the state is rank {state['rank']}'s, this is rank {own.rank}; residuals belong to their rank, "
            "load each rank's own"
        )


def load(own: "State", directory: Path) -> None:
    """Continue from a directory on all ranks, or raise on all of them."""
    _load_together(own, directory, lambda: _own_share(own, directory))


def _load_together(own: "State", source: Path | str, read: Callable[[], list[dict[str, Any]]]) -> None:
    """Continue from the states that `read` returns, on all ranks, or raise on all of them."""
    refusal, step, size = "", -1, -1
    try:
        states = read()
        step, size = int(states[0]["step"]), int(states[0]["world_size"])
        state = redistribute(states, own.rank, own.world_size)
        own.fit(state)
    except Exception as error:  # whatever the error, the other ranks wait for a message
        refusal = str(error) or type(error).__name__
    for transport in own.transports:  # all ranks must succeed, from the same step of the same job
        refusal = _shared_refusal(transport, source, step, size, refusal)
    if refusal:
        raise StateError(refusal)
    own.load_state_dict(state)


def _shared_refusal(transport: AllGather, source: Path | str, step: int, size: int, refusal: str) -> str:
    """Return why these ranks cannot load together, the same on all if this rank has no reason of its own."""
    word = torch.tensor([step, size, len(refusal) > 0], dtype=torch.int64).view(torch.uint8)
    said = [message.view(torch.int64).tolist() for message in transport.exchange([word])]
    refused = [rank for rank, (_, _, failed) in enumerate(said) if failed]
    if refusal or refused:
        ranks = ", ".join(map(str, refused))
        return refusal or f"rank {ranks} could not read its state from {source}; see its error"
    if len({step for step, _, _ in said}) > 1:
        steps = ", ".join(f"step {step} on rank {rank}" for rank, (step, _, _) in enumerate(said))
        return f"{source} holds states of different steps ({steps}); use an older checkpoint"
    if len({size for _, size, _ in said}) > 1:
        sizes = by_rank([f"{size} ranks" for _, size, _ in said])
        return f"{source} holds states of several jobs (of {sizes}); use a folder per checkpoint"
    return ""


def _own_share(own: "State", directory: Path) -> list[dict[str, Any]]:
    """Return the old ranks' states that this rank continues from."""
    found: dict[int, set[int]] = {}
    name = re.compile(file_name(r"(\d+)", r"(\d+)", own.shard))
    for path in directory.glob("rtopk-rank*"):
        if match := name.fullmatch(path.name):
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    complete = [size for size, ranks in found.items() if ranks == set(range(size))]
    if not complete and own.rank in found.get(own.world_size, ()):
        complete = [own.world_size]  # a local disk: other ranks check their own files
    if not complete:
        have = {size: sorted(ranks) for size, ranks in found.items()} or "none"
        raise StateError(f"{directory} holds no complete set of states (files of ranks: {have})")
    sets = {size: read_rank(directory, own.rank % size, size, own.shard) for size in complete}
    size = max(complete, key=lambda size: (sets[size]["step"], size == own.world_size))
    states = [read_rank(directory, rank, size, own.shard) for rank in range(own.rank, size, own.world_size)]
    for state in states or [sets[size]]:
        fits(state, own, any_rank=True)
    states = states or [_empty(sets[size])]
    if len({state["step"] for state in states}) > 1:
        raise StateError(
            f"{directory} holds states of different steps: {[state['step'] for state in states]}"
        )
    return states


def _empty(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a rank that the old job did not have: it starts empty, at the same step."""
    zeros = {kind: {n: torch.zeros_like(t) for n, t in by.items()} for kind, by in state["memory"].items()}
    return {**state, "memory": zeros}


def redistribute(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Merge the states of old ranks into that of a new rank; what the model will receive stays the same."""
    first = states[0]
    if first["world_size"] == world_size:
        return dict(first)
    factor = world_size / first["world_size"]
    memory: dict[str, dict[str, Tensor]] = {
        kind: {
            # An owner's residual is a part of the mean already. Other owners' entries go back to the memory.
            name: (1.0 if kind == OWNER else factor)
            * torch.stack([state["memory"][kind][name] for state in states]).sum(0)
            for name in tensors
        }
        for kind, tensors in first["memory"].items()
    }
    return {**first, "rank": rank, "world_size": world_size, "memory": memory}


def gather(own: "State") -> list[dict[str, Any]] | None:
    """Bring the states of all ranks to rank 0, for frameworks that write one file; None on the others."""
    parts = [byte_tensor(FILE.pack(own.state_dict()))]
    for transport in own.transports:  # first the replicas of each shard, then the shards
        arrived = [transport.gather(part) for part in parts]
        parts = [part for ranks in arrived for part in ranks or ()]
        if not parts:
            return None
    return [FILE.unpack(bytes(part.numpy())) for part in parts]


def scatter(own: "State", states: Sequence[Mapping[str, Any]]) -> None:
    """Continue from the states of all ranks of a job, or raise on all ranks; every rank passes all of them."""

    def share() -> list[dict[str, Any]]:
        same = [state for state in states if state.get("shard", "") == own.shard] or states
        for rank, state in enumerate(same):
            fits(state, own, any_rank=True)
            _expect(state, rank, len(same), f"part {rank} of the checkpoint")
        mine = same[own.rank :: own.world_size]
        return [dict(state) for state in mine] or [_empty(same[0])]

    _load_together(own, "the checkpoint", share)


class Sharded:
    """A state whose keys include the rank.

    torch.distributed.checkpoint treats tensors under the same key on several ranks as copies and keeps one;
    residuals differ. It has no checksum, so a digest is saved too. It gives a reader only what that asks for, so
    the kinds of vectors are saved too: a reader with other options would lose the rest unnoticed. Both are in the
    field `format`, because older checkpoints must still have every key that is asked for.
    """

    def __init__(self, state: "State") -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state under this rank's key."""
        state = self.state.state_dict()
        return {
            self._key: {**state, "format": " ".join([str(FORMAT), digest(state).hex(), *state["memory"]])}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's part."""
        part = dict(self._part(state))
        expected, *kinds = self._told(part) or [""]
        self._expect_kinds(kinds, part["memory"])
        if expected and digest(part).hex() != expected:
            raise StateError(f"{self._key} of the checkpoint is damaged: checksum is wrong; {FILE.advice}")
        self.state.load_state_dict(part)

    def _told(self, part: dict[str, Any]) -> list[str]:
        """Return what the field `format` tells besides the version, which is left there."""
        version, *told = str(part.get("format")).split()
        if version == str(FORMAT):
            part["format"] = FORMAT
        return told

    def _expect_kinds(self, kinds: Sequence[str], memory: Mapping[str, Any]) -> None:
        """Raise StateError if a checkpoint that tells its kinds of vectors holds others than were read."""
        read = " ".join(memory).split()
        if kinds and set(kinds) != set(read):
            raise StateError(
                f"{self._key} of the checkpoint holds {kinds}, and this job reads {read}: the rest would be lost. "
                "Use the options of the job that wrote it (memory, exchange), and register with the optimizer "
                "before you load"
            )

    def _part(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._key not in state:
            raise StateError(f"the checkpoint holds nothing for {self._key}; it has {sorted(state)}")
        found: Mapping[str, Any] = state[self._key]
        return found

    @property
    def _key(self) -> str:
        return f"rank{self.state.rank}-of-{self.state.world_size}"
