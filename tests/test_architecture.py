"""The house rules that a machine can check: import direction, what `import rtopk` loads, public names."""

import ast
import subprocess
import sys
from pathlib import Path

import rtopk

SOURCE = Path(rtopk.__file__).parent
# Imports go only down this list: a module may import those before it.
ORDER = [
    "sparse", "layout", "seed", "schedule", "simd", "loops", "draws", "cut", "threads", "twin", "floors",
    "candidates", "kernels", "select", "rivals", "headroom", "memory", "wire", "codec", "union",
    "aggregate", "transport", "sparsifier", "powersgd", "outer", "ddp", "adapters", "flower", "local",
    "lab", "experiments", "bench", "report", "advise", "cli", "__main__",
]  # fmt: skip


def stage(module):
    """The stage of a dotted name below rtopk: its first part."""
    return module.split(".")[1] if "." in module else ""


def imports():
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("rtopk", *path.relative_to(SOURCE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rtopk"):
                yield parts, node.module
            elif isinstance(node, ast.Import):
                yield from ((parts, a.name) for a in node.names if a.name.startswith("rtopk"))


def test_imports_go_down():
    seen = 0
    for (_, importer, *_rest), target in ((p, t) for p, t in imports() if p[1] != "__init__"):
        if not stage(target) or importer == stage(target):
            continue  # the package itself (its version), or a part of the same stage
        assert ORDER.index(stage(target)) < ORDER.index(importer), f"{importer} imports {target}"
        seen += 1
    assert seen > 10


def test_every_module_has_a_place_in_the_order():
    names = {p.stem for p in SOURCE.glob("*.py")} | {p.parent.name for p in SOURCE.glob("*/__init__.py")}
    assert names - {"__init__"} <= set(ORDER)


def test_import_rtopk_loads_only_the_core():
    code = "import sys, rtopk; print(*sys.modules)"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    for name in (
        "flwr",
        "matplotlib",
        "sklearn",
        "lightning",
        "typer",  # scipy is not named: numba imports it by itself where it is installed
        "rich",
        "rtopk.studies",
        "rtopk.tools.cli",
    ):
        assert name not in loaded, f"import rtopk loads {name}"
    assert "rtopk.select" in loaded


def test_public_names():
    assert sorted(rtopk.__all__) == rtopk.__all__
    assert all(hasattr(rtopk, name) for name in rtopk.__all__)
    public = {
        name for name, value in vars(rtopk).items() if not name.startswith("_") and not _is_module(value)
    }
    assert public == set(rtopk.__all__)


def _is_module(value):
    return type(value).__name__ == "module"


def test_no_forbidden_file_names():
    bad = {"utils", "helpers", "common", "base", "manager"}
    assert not [p for p in SOURCE.rglob("*.py") if p.stem in bad]


def test_no_global_generator_in_the_library():
    """No module of the core seeds or reads torch's, numpy's or Python's global generator."""
    for path in SOURCE.glob("*.py"):
        text = path.read_text()
        for word in ("torch.manual_seed", "torch.seed(", "np.random.seed", "random.seed", "np.random.rand"):
            assert word not in text, f"{path.name} uses {word}"
