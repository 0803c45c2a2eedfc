"""Time steps of two checkouts of this repository in turns, and print the medians of some processes of each.

    python tests/kernels/compare_commits.py OLD NEW [--backend torch] [--processes 7]

OLD and NEW are folders, as `git worktree add OLD COMMIT` makes them. One thread, 11.2 M fp32 entries. "compress"
is a step with a whole gradient; "hook" gives the memory the gradient as the DDP hook does; "small" is `compress`
for 60 tensors of 1,000 entries, one after the other, where the interpreter takes most of the time.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

WORKER = """
import sys, time, torch
from rtopk import Layout, RTopK, Sparsifier
torch.set_num_threads(1)
D, WARM = 11_200_000, 12
rng = torch.Generator().manual_seed(0)
gradients = [torch.randn(D, generator=rng) ** 3 for _ in range(3)]
flush = torch.zeros(32_000_000)

def node(d, density):
    return Sparsifier(RTopK(r_over_k=1), density, layout=Layout(("gradient",), ((d,),), dense_size=0))

def compress(one, step, gradient):
    one.compress(gradient, step)

def hook(one, step, gradient):
    one.memory.snapshot()
    if step == 0:
        return one.compress(gradient, step)
    if hasattr(one, "expect"):
        one.expect(step)
    one.memory.put(0, gradient)
    one.compress(None, step)

def small(many, step, gradient):
    for place, one in enumerate(many):
        one.compress(gradient[1000 * place : 1000 * place + 1000], step)

CASES = {
    "compress, 1 %": (compress, node(D, 0.01)),
    "compress, 0.1 %": (compress, node(D, 0.001)),
    "hook, 1 %": (hook, node(D, 0.01)),
    "hook, 0.1 %": (hook, node(D, 0.001)),
    "small, 1 %": (small, [node(1000, 0.01) for _ in range(60)]),
}
steps = dict.fromkeys(CASES, 0)
if torch.get_num_threads() != 1:
    raise SystemExit("one thread")
for line in sys.stdin:
    name, count = line.strip().rsplit("*", 1)
    for _ in range(int(count)):
        work, state = CASES[name]
        flush.sum()
        gradient = gradients[steps[name] % len(gradients)]
        begin = time.perf_counter()
        work(state, steps[name], gradient)
        taken = time.perf_counter() - begin
        steps[name] += 1
    print(taken, flush=True)
"""
CASES = ("compress, 1 %", "compress, 0.1 %", "hook, 1 %", "hook, 0.1 %", "small, 1 %")
WARM = 6


def worker(folder, backend):
    environment = os.environ | {"PYTHONPATH": str(Path(folder).resolve() / "src"), "OMP_NUM_THREADS": "1"}
    environment["RTOPK_BACKEND"] = backend
    # Else malloc decides anew in each process whether it returns temporary tensors to the system, which takes up to
    # as long as the step.
    environment |= {"MALLOC_MMAP_THRESHOLD_": "33000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process, name, count=1):
    process.stdin.write(f"{name}*{count}\n")
    process.stdin.flush()
    return 1000.0 * float(process.stdout.readline())


def compare(folders, given):
    """Return milliseconds of every step, old and new, of one process each: medians."""
    old, new = (worker(folder, given.backend) for folder in folders)
    found = {}
    for name in [case for case in CASES if given.only in case]:
        for process in (old, new):
            ask(process, name, WARM)
        taken = []
        for turn in range(given.repetitions):
            pair = [ask(process, name) for process in ((old, new) if turn % 2 else (new, old))]
            taken.append(pair if turn % 2 else pair[::-1])
        found[name] = [statistics.median(column) for column in zip(*taken, strict=True)]
    for process in (old, new):
        process.stdin.close()
        process.wait()
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs=2)
    parser.add_argument("--backend", default="torch")
    parser.add_argument(
        "--processes", type=int, default=7, help="of each: they differ by where their memory lies"
    )
    parser.add_argument("--repetitions", type=int, default=11, help="in each process")
    parser.add_argument("--only", default="", help="part of the name of a step")
    given = parser.parse_args()
    rows = [compare(given.folders, given) for _ in range(given.processes)]
    print("| step | old ms (least to most) | new ms (least to most) |\n| --- | ---: | ---: |")
    for name in rows[0]:
        both = [sorted(column) for column in zip(*(row[name] for row in rows), strict=True)]
        said = [f"{statistics.median(ms):.1f} ({ms[0]:.1f} to {ms[-1]:.1f})" for ms in both]
        print(f"| {name} | {said[0]} | {said[1]} |")


if __name__ == "__main__":
    main()
