"""What the study of local steps shows: losses, bytes, differences from SparseLoCo, and a picture (docs/gpt.md)."""

from collections.abc import Sequence
from pathlib import Path

from rtopk.studies.local import Found


def marks(task: str) -> tuple[str, str]:
    """Return the lines of the page between which the tables of a task go."""
    command = f"rtopk gpt --task {task} --recorded --write docs/gpt.md"
    return f"<!-- {task}: begin (written by `{command}`) -->", f"<!-- {task}: end -->"


def markdown(task: str, found: Sequence[Found]) -> str:
    """Return the tables of a task."""
    return "\n".join(f"{one.row.label}, H = {one.row.local_steps}: {one.mean:.4f}" for one in found) + "\n"


def draw(task: str, found: Sequence[Found], path: Path) -> None:
    """Draw loss against bytes and against rounds."""
