"""No file, message or argument is ever run as code: nowhere in the tree stands a call that could."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREES = ("src", "tests", "examples", "docs")
FORBIDDEN = {"pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "marshal.load", "shelve.open",
             "eval", "exec", "os.system", "os.popen", "joblib.load", "dill.load", "dill.loads",
             "yaml.load", "yaml.unsafe_load", "numba.core.serialize.loads"}  # fmt: skip


def dangers(source):
    """Yield what in a source could run code that came as data."""
    tree = ast.parse(source)
    names = {}  # what imports call things here
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        head, dot, rest = ast.unparse(node.func).partition(".")
        name = names.get(head, head) + dot + rest
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in FORBIDDEN:
            yield f"line {node.lineno}: {name}"
        if name == "torch.load" and given.get("weights_only") != "True":
            yield f"line {node.lineno}: torch.load without weights_only=True"
        if given.get("shell", "False") != "False":
            yield f"line {node.lineno}: shell={given['shell']}"
        if given.get("allow_pickle", "False") != "False":
            yield f"line {node.lineno}: allow_pickle={given['allow_pickle']}"


@pytest.mark.parametrize("tree", TREES)
def test_no_call_runs_data(tree):
    found = [
        f"{path.relative_to(ROOT)} {danger}"
        for path in sorted((ROOT / tree).rglob("*.py"))
        for danger in dangers(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(f)",
        "import pickle as p\np.loads(b)",
        "from pickle import load as read\nread(f)",
        "import pickle\npickle.Unpickler(f).load()",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "from torch import load\nload(f, weights_only=flag)",
        "eval(text)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
    ],
)
def test_the_search_finds(source):
    assert list(dangers(source))
