"""Compile the Triton programs for cards that are not here and print, as JSON, what each needs.

    python tests/kernels/compile_programs.py            every program for every card
    python tests/kernels/compile_programs.py --all      also its rarer variants

Run as a program of its own: in the tests' process triton interprets.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rtopk.kernels import device, programs

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FLOATS, WORDS, INTS = "*fp32", "*i64", "*i32"
ALIGNED = "i32 * 16"  # triton compiles for multiples of 16 by themselves: where most parts begin
SWEEP = [*[FLOATS] * 5, INTS, WORDS, WORDS, "i32", ALIGNED, "i32", "i32", "i32", "fp32", "fp32"]
PART = [kind.replace(ALIGNED, "i32") for kind in SWEEP]
ADDS = {"ADDS": True, "MOVES": False, "DECAYS": False, "SEARCHES": True}
SOURCE = [FLOATS, FLOATS, WORDS, WORDS]
BLOCK = {"BLOCK": device.BLOCK}


VARIANTS = {"sweep, bf16", "sweep, momentum", "sweep, part anywhere"}  # usually for one card only
RARE = {"sweep, fp16", "sweep, decay", "sweep, no gradient", "sweep, no search",
        "tally, last bits", "rank, over 2**31"}  # fmt: skip


def half(kind):
    return [FLOATS, FLOATS, kind, *SWEEP[3:]]


CASES = {  # name: program, types of its arguments, constants
    "sweep": ("sweep", SWEEP, {**ADDS, **BLOCK}),
    "sweep, fp16": ("sweep", half("*fp16"), {**ADDS, **BLOCK}),
    "sweep, bf16": ("sweep", half("*bf16"), {**ADDS, **BLOCK}),
    "sweep, momentum": ("sweep", SWEEP, {**ADDS, "MOVES": True, **BLOCK}),
    "sweep, decay": ("sweep", SWEEP, {**ADDS, "DECAYS": True, **BLOCK}),
    "sweep, part anywhere": ("sweep", PART, {**ADDS, **BLOCK}),
    "sweep, no gradient": ("sweep", SWEEP, {**ADDS, "ADDS": False, **BLOCK}),
    "sweep, no search": ("sweep", SWEEP, {**ADDS, "SEARCHES": False, **BLOCK}),
    "gather": ("gather", [FLOATS, INTS, WORDS, INTS, FLOATS, "i32"], BLOCK),
    "tally, high bits": ("tally", [*SOURCE, WORDS, "i32", "i32", "i32"], {"SHIFT": 20, "BITS": 11, **BLOCK}),
    "tally, last bits": ("tally", [*SOURCE, WORDS, "i32", "i32", "i32"], {"SHIFT": 0, "BITS": 10, **BLOCK}),
    "narrow": ("narrow", [WORDS, WORDS], {"SHIFT": 20, "BITS": 11}),
    "count": ("count", [*SOURCE, WORDS, "i32", "i32", "i32", "i32"], BLOCK),
    "rank": ("rank", [FLOATS, INTS, *SOURCE[1:], WORDS, WORDS, FLOATS, "i32", "i32", "i32", "i32"], BLOCK),
    "rank, over 2**31": (
        "rank", [FLOATS, WORDS, *SOURCE[1:], WORDS, WORDS, FLOATS, "i64", "i64", "i64", "i32"], BLOCK
    ),
    "subtract": ("subtract", [FLOATS, WORDS, FLOATS, "i32", "i32", "fp32"], {"SCALES": True, **BLOCK}),
}  # fmt: skip


def compiled(case, target):
    """Return a program as `device._launch` would compile it; every tensor begins at a multiple of 16 bytes."""
    name, types, constants = CASES[case]
    program = getattr(programs, name)
    kinds = [*(kind.removesuffix(" * 16") for kind in types), *["constexpr"] * len(constants)]
    signature = dict(zip(program.arg_names, kinds, strict=True))
    assert list(signature)[len(types) :] == list(constants), case
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if "*" in kind}
    source = ASTSource(program, signature, constants, aligned)
    return triton.compile(
        source, target=TARGETS[target], options=device.OPTIONS | device.ASSERTS.get(name, {})
    )


def of_nvidia(made):
    """Ask cuobjdump what the machine code takes, and count what the PTX moves."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "program.cubin"
        cubin.write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    ptx = made.asm["ptx"]
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "loaded": moved(ptx, "ld"),
        "stored": moved(ptx, "st"),
        "fused": len(re.findall(r"\bfma\.", ptx)),
        "flushed": len(re.findall(r"\.ftz\.f32", ptx)),
        "asserts": "call.uni" in ptx and "__assertfail" in ptx,
    }


def moved(ptx, kind):
    """Return the bytes that a thread loads from or stores to global memory, without those behind a predicate."""
    found = re.findall(rf"^\s*{kind}\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx, re.MULTILINE)
    return sum(int(width or 1) * int(size) // 8 for width, size in found)


def of_amd(made):
    """Read what the assembler wrote down."""
    text = made.asm["amdgcn"]

    def said(key):
        return sum(map(int, re.findall(rf"\.{key}:\s*(\d+)", text)))

    return {
        "registers": said("vgpr_count"),
        "spilled": said("vgpr_spill_count") + said("sgpr_spill_count") + said("private_segment_fixed_size"),
        "fused": len(re.findall(r"v_(?:pk_)?fma_f32|v_fmac_f32|v_mad_f32", text)),
        "flushed": len(re.findall(r"\.amdhsa_float_denorm_mode_32 [0-2]", text)),  # 3: none are
        "asserts": "s_trap" in text,
    }


def main(everything):
    needs = {}
    for target in TARGETS:
        for case in CASES:
            if not everything and (case in RARE or (case in VARIANTS and target != "sm_90")):
                continue
            made = compiled(case, target)
            needs[f"{case} on {target}"] = {
                "shared": made.metadata.shared,
                "threads": made.metadata.num_warps * TARGETS[target].warp_size,
                **(of_nvidia(made) if "ptx" in made.asm else of_amd(made)),
            }
    print(json.dumps(needs, indent=1))


if __name__ == "__main__":
    main("--all" in sys.argv)
