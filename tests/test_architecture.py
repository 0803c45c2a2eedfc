"""The house rules that a machine can check: import direction, what `import rtopk` loads, public names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rtopk

SOURCE = Path(rtopk.__file__).parent
# Two halves, the library first. A room may import those before it in its half; tools and studies may import the
# library. `tools.show` lies below the studies, which draw with it.
LIBRARY = [
    "compat", "sparse", "layout", "seed", "schedule", "state_file", "kernels", "select", "memory", "wire", "codec",
    "aggregate", "transport", "sparsifier", "exchange", "defaults", "replicas", "ddp", "fsdp", "local", "torchft",
    "flower", "adapters",
]  # fmt: skip
REST = [
    "tools.show", "studies.variants", "studies.config", "studies.tasks", "studies.train", "studies.paper",
    "studies.equal_bytes", "studies.local", "studies.federation", "studies.lab", "studies.bench", "tools.advise",
    "tools.report", "tools.cli", "__main__",
]  # fmt: skip
ORDER = [*LIBRARY, *REST]
# Inside a room the order is free, but for these, whose files are stages of their own.
INSIDE = {
    "kernels": [
        "jit", "simd", "instructions", "threads", "loops", "draws", "rank", "union", "host", "search", "collect",
        "plain", "cpu", "programs", "device", "__init__",
    ],
    "select": ["rule", "family", "threshold", "age", "dealt", "chunked", "__init__"],
    "memory": ["vectors", "feedback", "momentum", "__init__"],
    "exchange": ["vector", "gathered", "shares", "owner", "reduced", "__init__"],
}  # fmt: skip


def modules():
    """Every module of the package, by dotted name below rtopk."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(parts), path


KNOWN = {name.removesuffix(".__init__") for name, _ in modules()}


def room(name):
    """The room of a dotted name below rtopk."""
    parts = name.removesuffix(".__init__").split(".")
    if parts[0] in ("studies", "tools"):
        return ".".join(parts[:2])
    return parts[0]


def targets(path):
    """Every module of ours that a file imports, however it spells it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("rtopk.") for a in node.names if a.name.startswith("rtopk."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            if node.module == "rtopk" or (node.module or "").startswith("rtopk."):
                base = node.module.removeprefix("rtopk").lstrip(".")
                for alias in node.names:
                    full = f"{base}.{alias.name}" if base else alias.name
                    if full in KNOWN:
                        yield full
                    elif base:
                        yield base


def edges():
    for name, path in modules():
        if name != "__init__":
            yield from ((name, target) for target in targets(path))


def test_imports_go_down():
    found = [
        f"{importer} imports {target}"
        for importer, target in edges()
        if room(importer) != room(target)
        and room(target) in ORDER
        and ORDER.index(room(target)) > ORDER.index(room(importer))
    ]
    assert found == []
    assert len(list(edges())) > 400


@pytest.mark.parametrize("name", INSIDE)
def test_imports_go_down_inside_a_room(name):
    order = INSIDE[name]
    assert {module.partition(".")[2] for module, _ in modules() if room(module) == name} == set(order)
    for importer, target in edges():
        if room(importer) == room(target) == name:
            inner = target.partition(".")[2] or "__init__"
            if inner != "__init__":  # the package itself: what it has chosen among its files
                assert order.index(inner) <= order.index(importer.partition(".")[2]), (
                    f"{importer} imports {target}"
                )


def test_the_library_never_imports_studies_or_tools():
    """In any spelling, strings handed to import_module among them."""
    for name, path in modules():
        if room(name) in LIBRARY or name == "__init__":
            assert not [t for t in targets(path) if t.split(".")[0] in ("studies", "tools")], name
            text = path.read_text()
            assert "rtopk.studies" not in text, name
            assert "rtopk.tools" not in text, name


def test_every_module_has_a_place_in_the_order():
    rooms = {room(name) for name, _ in modules()} - {"__init__"}
    assert rooms - {"studies", "tools"} <= set(ORDER)
    assert set(ORDER) <= rooms


def test_import_rtopk_loads_only_the_core():
    code = "import sys, rtopk; rtopk.ddp, rtopk.Sparsifier; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    for name in (
        "flwr", "matplotlib", "sklearn", "lightning", "typer", "rich", "torchft", "triton",
        "rtopk.studies", "rtopk.tools", "numba", "llvmlite", "scipy",
    ):  # fmt: skip
        assert name not in loaded, f"import rtopk loads {name}"
    assert "rtopk.select" in loaded


def test_public_names():
    assert sorted(rtopk.__all__) == rtopk.__all__
    assert all(getattr(rtopk, name).__module__.startswith("rtopk.") for name in rtopk.__all__)
    assert set(rtopk.__all__) <= set(dir(rtopk))
    with pytest.raises(AttributeError, match="no attribute 'topk'"):
        rtopk.topk  # noqa: B018


def test_type_checkers_see_the_names_that_are_imported_lazily():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (guarded,) = (
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    seen = {alias.name for node in guarded.body for alias in node.names}
    assert seen == {*rtopk.__all__, *rtopk._ENGINES}


def test_only_the_kernels_ask_what_device_a_tensor_is_on():
    """A device is recognised in one place; `is_cuda` in the hook is for Futures, which need their devices."""
    words = (".is_cpu", "device.type ==", "device.type !=", "compilable(", ".is_cuda")
    found = [
        name
        for name, path in modules()
        if room(name) in LIBRARY and room(name) != "kernels" and any(w in path.read_text() for w in words)
    ]
    assert set(found) <= {"ddp.buckets", "transport"}, found


def test_no_forbidden_file_names():
    bad = {"utils", "helpers", "common", "base", "manager"}
    assert not [p for p in SOURCE.rglob("*.py") if p.stem in bad]


def test_no_global_generator_in_the_library():
    """No module of the library seeds or reads torch's, numpy's or Python's global generator."""
    for name, path in modules():
        if room(name) in LIBRARY:
            text = path.read_text()
            for word in (
                "torch.manual_seed",
                "torch.seed(",
                "np.random.seed",
                "random.seed",
                "np.random.rand",
            ):
                assert word not in text, f"{name} uses {word}"
