"""Run the library's tests with other versions of torch and Python: `make test-versions`.

Each argument is TORCH@PYTHON, such as 2.6@3.10. For each, one after the other, an environment is made in a
temporary folder, the library's tests run in it, and it is removed again: the wheels of one torch take several GB.
KEEP=FOLDER keeps the environments there, for a second try; TESTS="FILE ..." runs only some. Prints a row of a table
for each, in Markdown, and exits with 1 if a test failed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = [
    "tests/test_laws.py", "tests/test_memory.py", "tests/test_reference.py", "tests/test_layout.py",
    "tests/test_schedule.py", "tests/test_aggregate.py", "tests/test_before.py", "tests/kernels", "tests/select",
    "tests/wire", "tests/local", "tests/ddp", "tests/fsdp",
]  # fmt: skip
NEEDS = [
    "pytest", "hypothesis", "coverage", "scikit-learn", "tensorboard", "zstandard", "lightning", "accelerate",
    "typer", "rich", "setuptools<81",  # older tensorboards import pkg_resources
]  # fmt: skip


def interpreter(version: str) -> str:
    """Return a Python of this version: on the path, or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(found)
    raise SystemExit(f"there is no python{version}; install it, or leave it out of VERSIONS")


def attempt(torch: str, python: str, folder: Path) -> tuple[bool, str]:
    """Run the tests in an environment in a folder, made if need be; return whether all passed, and a row."""
    tree, environment = folder / "tree", folder / "venv"
    own = str(environment / "bin" / "python")
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "runs", "site", "results", "__pycache__"))
    pip = [own, "-m", "pip", "--disable-pip-version-check"]
    if not environment.exists():
        subprocess.run([interpreter(python), "-m", "venv", environment], check=True)
        install = [
            "install",
            "--quiet",
            "--no-cache-dir",
            "--no-compile",
            f"torch=={torch}.*",
            *NEEDS,
            "-e",
            str(tree),
        ]
        subprocess.run([*pip, *install], check=True)
    # Warnings are errors with the versions that we pin; other versions bring other warnings.
    options = ["-q", "-W", "default", "-o", "addopts=--strict-markers -m 'not slow'"]
    done = subprocess.run(
        [own, "-m", "pytest", *options, *os.environ.get("TESTS", " ".join(TESTS)).split()],
        cwd=tree,
        text=True,
        stdout=subprocess.PIPE,
        check=False,
    )
    print(done.stdout, flush=True)
    listed = subprocess.run([*pip, "list", "--format", "freeze"], capture_output=True, text=True, check=True)
    versions = dict(line.split("==") for line in listed.stdout.splitlines() if "==" in line)
    counts = re.sub(r"^=+ | =+$| in .*", "", done.stdout.strip().splitlines()[-1])
    row = (versions["torch"], python, versions["numba"], versions["numpy"], counts)
    return done.returncode == 0, f"| {' | '.join(row)} |"


def main() -> None:
    """Try every pair."""
    lines, failed = ["| torch | Python | numba | numpy | tests |", "| --- | --- | --- | --- | --- |"], False
    kept = os.environ.get("KEEP")
    for pair in sys.argv[1:]:
        torch, _, python = pair.partition("@")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="rtopk-") as folder:
            passed, line = attempt(torch, python, Path(kept) / pair if kept else Path(folder))
        print(
            f"{pair}: {'passed' if passed else 'FAILED'} after {time.monotonic() - started:.0f} s", flush=True
        )
        lines.append(line)
        failed |= not passed
    print(*lines, sep="\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
