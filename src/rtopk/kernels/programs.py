"""The Triton programs of the `triton` backend; `device` launches them. Importing this file imports triton.

Every program works on a block of `BLOCK` consecutive entries. Magnitudes are compared as keys: the bits of a
float without its sign, read as an integer (see `simd`). Nothing here decides an order by an atomic: integers are
added and maxima taken atomically, whose results do not depend on the order, and every store of an entry has a
place of its own that a prefix sum gave it. Each docstring has the race argument: who writes where.

Launch all of them with `enable_fp_fusion=False`: the CPU rounds every operation, and so must they.
"""

# Triton compiles this file: its functions take tensors of triton, for which there are no types to write down.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

# Words of `state`, int64, on the device.
PEAK = tl.constexpr(0)  # the largest key seen
KEY = tl.constexpr(1)  # the key of the r-th entry, as far as it is known: its high bits
LEFT = tl.constexpr(
    2
)  # how many of the r largest have these high bits; at the end, the ties that belong to them
STATE = 3

SIGNLESS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys(values):
    """Return the keys of some fp32 values."""
    return values.to(tl.int32, bitcast=True) & SIGNLESS


@triton.jit
def _within(limit, start, BLOCK: tl.constexpr):
    """Return how many entries of a block that begins at `start` lie below a limit: 0 to BLOCK."""
    return tl.maximum(tl.minimum(limit - start, BLOCK), 0).to(
        tl.int32
    )  # bounded first: 32 bits may be too few


@triton.jit(do_not_specialize=["first", "end", "searched", "bound"])
def sweep(
    sums,
    vector,
    gradient,
    moved,
    velocity,
    bits,
    counts,
    state,
    first,
    begin,
    end,
    searched,
    bound,
    keep,
    scale,
    ADDS: tl.constexpr,
    MOVES: tl.constexpr,
    DECAYS: tl.constexpr,
    SEARCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Accumulate a block of the part [begin, end) and note which sums reach the bound: one pass over memory.

    `sums`, which may be the vector, gets vector + gradient (ADDS; the gradient begins at `begin`); with MOVES,
    `moved`, which may be the velocity, gets keep * velocity + scale * gradient, and that is added instead; with
    DECAYS, the vector is multiplied by `keep` first. Without ADDS the vector is only read. With SEARCHES, bit i of
    the block is set if entry i, among the first `searched` of the vector, reaches the bound.

    Who writes where: program p has block p + first. It alone reads and writes the block's entries that lie in the
    part, in sums, vector, moved and velocity, and parts do not overlap. The block's words of bits and counts are
    its own too, unless it is cut by an end of the part; then a program of the part beside it may write them, so
    bits are set and counts added atomically, from zero. PEAK is shared, a maximum. None depends on the order.
    """
    start = (tl.program_id(0) + first).to(tl.int64) * BLOCK
    # A whole block needs no mask, and its loads are as wide as the machine allows.
    if (start >= begin) & (start + BLOCK <= end):
        _sweep(
            sums, vector, gradient, moved, velocity, bits, counts, state, start, begin, end, searched, bound, keep,
            scale, ADDS, MOVES, DECAYS, SEARCHES, True, BLOCK,
        )  # fmt: skip
    else:
        _sweep(
            sums, vector, gradient, moved, velocity, bits, counts, state, start, begin, end, searched, bound, keep,
            scale, ADDS, MOVES, DECAYS, SEARCHES, False, BLOCK,
        )  # fmt: skip


@triton.jit
def _sweep(
    sums, vector, gradient, moved, velocity, bits, counts, state, start, begin, end, searched, bound, keep, scale,
    ADDS: tl.constexpr, MOVES: tl.constexpr, DECAYS: tl.constexpr, SEARCHES: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Do what `sweep` does to the block that begins at `start`; WHOLE: all of it lies in the part."""
    lanes = tl.arange(0, BLOCK)
    inside = None if WHOLE else (lanes >= _within(begin, start, BLOCK)) & (lanes < _within(end, start, BLOCK))
    total = tl.load(vector + start + lanes, mask=inside, other=None if WHOLE else 0.0)
    if ADDS:
        given = tl.load(gradient + (start - begin) + lanes, mask=inside, other=None if WHOLE else 0.0)
        if (
            given.dtype == tl.bfloat16
        ):  # the upper half of an fp32; the interpreter's own way loses subnormals
            fresh = (given.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            fresh = given.to(tl.float32)
        if MOVES:
            speed = tl.load(velocity + start + lanes, mask=inside, other=None if WHOLE else 0.0)
            fresh = speed * keep + fresh * scale
            tl.store(moved + start + lanes, fresh, mask=inside)
        if DECAYS:
            total = total * keep
        total = total + fresh
        tl.store(sums + start + lanes, total, mask=inside)
    if SEARCHES:
        keys = _keys(total)
        reached = (keys >= bound) & (lanes < _within(searched, start, BLOCK))
        if not WHOLE:
            keys, reached = tl.where(inside, keys, 0), reached & inside
        tl.atomic_max(state + PEAK, tl.max(keys, 0).to(tl.int64), sem="relaxed")
        number = tl.sum(reached.to(tl.int64), 0)
        WORDS: tl.constexpr = BLOCK // 32
        spread = tl.reshape(reached.to(tl.int32), (WORDS, 32)) << tl.arange(0, 32)[None, :]
        words = tl.sum(spread, 1)  # of distinct powers of two
        here, there = counts + start // BLOCK, bits + start // 32 + tl.arange(0, WORDS)
        if WHOLE:
            tl.store(here, number)
            tl.store(there, words)
        else:
            tl.atomic_add(here, number, sem="relaxed")
            tl.atomic_or(there, words, sem="relaxed")


@triton.jit(do_not_specialize=["room"])
def gather(vector, bits, upto, positions, values, room, BLOCK: tl.constexpr):
    """Store the entries whose bit is set, in order: block p's begin where those of the blocks before it end.

    `upto[p]` is how many bits are set in the blocks up to p, including it. Of the vector only marked entries are
    read. Entries beyond the room are dropped; `upto` tells, and then none of what is stored is used.

    Who writes where: a set bit has the number of set bits before it as its place, so places are distinct.
    """
    block = tl.program_id(0)
    before = tl.load(upto + block - 1, mask=block > 0, other=0)
    if tl.load(upto + block) == before:
        return
    start = block.to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    found = (tl.load(bits + start // 32 + lanes // 32) >> (lanes % 32)) & 1
    at = tl.cumsum(found, 0) - found
    kept = (found == 1) & (at < _within(room, before, BLOCK))
    entries = tl.load(vector + start + lanes, mask=kept, other=0.0)
    tl.store(positions + before + at, start + lanes, mask=kept)
    tl.store(values + before + at, entries, mask=kept)


@triton.jit
def _source(found, size, r, room):
    """Return how many candidates to look at and how many entries of the vector; one of them is 0.

    If the guess was too high or far too low, the candidates are not used, and all of the vector is. The device
    decides this by itself, so nobody has to wait for their number.
    """
    number = tl.load(found)
    good = (number >= r) & (number <= room)
    return tl.where(good, number, 0), tl.where(good, 0, size)


@triton.jit
def _look(few, whole, candidates, vector, start, lanes, BLOCK: tl.constexpr):
    """Return which lanes are in use and the entries there, of the candidates or of the vector."""
    near, far = _within(few, start, BLOCK), _within(whole, start, BLOCK)
    of_candidates = tl.load(candidates + start + lanes, mask=lanes < near, other=0.0)
    of_vector = tl.load(vector + start + lanes, mask=lanes < far, other=0.0)
    return lanes < tl.maximum(near, far), tl.where(lanes < near, of_candidates, of_vector)


@triton.jit(do_not_specialize=["size", "r", "room"])
def tally(
    candidates,
    vector,
    found,
    state,
    histogram,
    size,
    r,
    room,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the keys of a block by their next BITS bits, among those that agree with KEY in the bits above.

    Who writes where: all programs add integers to one histogram, atomically; sums do not depend on the order.
    """
    few, whole = _source(found, size, r, room)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start >= tl.maximum(few, whole):
        return
    used, entries = _look(few, whole, candidates, vector, start, tl.arange(0, BLOCK), BLOCK)
    keys = _keys(entries)
    prefix = tl.load(state + KEY).to(tl.int32)
    if SHIFT + BITS < 31:
        used = used & ((keys >> (SHIFT + BITS)) == (prefix >> (SHIFT + BITS)))
    digits = (keys >> SHIFT) & ((1 << BITS) - 1)
    counted = tl.histogram(digits, 1 << BITS, mask=used)
    bins = tl.arange(0, 1 << BITS)
    tl.atomic_add(histogram + bins, counted.to(tl.int64), mask=counted > 0, sem="relaxed")


@triton.jit
def narrow(state, histogram, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """Find the bin that holds the r-th largest: add its bits to KEY, and take what lies above it from LEFT.

    Who writes where: one program, and the launches before and after it are ordered by the stream.
    """
    bins = tl.arange(0, 1 << BITS)
    counted = tl.load(histogram + bins)
    left = tl.load(state + LEFT)
    above = tl.sum(counted, 0) - tl.cumsum(counted, 0)  # in the bins above this one
    here = (above < left) & (left <= above + counted)  # true of one bin
    found = tl.sum(tl.where(here, bins, 0), 0)
    over = tl.sum(tl.where(here, above, 0), 0)
    tl.store(state + KEY, tl.load(state + KEY) + (found.to(tl.int64) << SHIFT))
    tl.store(state + LEFT, left - over)


@triton.jit(do_not_specialize=["size", "r", "room", "blocks"])
def count(candidates, vector, found, state, counts, size, r, room, blocks, BLOCK: tl.constexpr):
    """Count the keys of a block above the r-th, and those equal to it.

    Who writes where: program p writes words p and blocks + p of counts, also where it has nothing to look at.
    """
    few, whole = _source(found, size, r, room)
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    if start >= tl.maximum(few, whole):
        tl.store(counts + block, tl.zeros((), tl.int64))
        tl.store(counts + blocks + block, tl.zeros((), tl.int64))
        return
    used, entries = _look(few, whole, candidates, vector, start, tl.arange(0, BLOCK), BLOCK)
    keys = _keys(entries)
    key = tl.load(state + KEY).to(tl.int32)
    tl.store(counts + block, tl.sum((used & (keys > key)).to(tl.int64), 0))
    tl.store(counts + blocks + block, tl.sum((used & (keys == key)).to(tl.int64), 0))


@triton.jit(do_not_specialize=["size", "r", "room", "blocks"])
def rank(
    candidates,
    positions,
    vector,
    found,
    state,
    upto,
    out_positions,
    out_values,
    size,
    r,
    room,
    blocks,
    BLOCK: tl.constexpr,
):
    """Store the r largest entries in order of position: all above the r-th key, and the first LEFT equal to it.

    `upto[p]` and `upto[blocks + p]` are how many lie above it, and are equal to it, in the blocks up to p.

    Who writes where: an entry's place is the number of entries before it that belong to the r, so places are
    distinct and fill [0, r).
    """
    few, whole = _source(found, size, r, room)
    block = tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    if start >= tl.maximum(few, whole):
        return
    lanes = tl.arange(0, BLOCK)
    used, entries = _look(few, whole, candidates, vector, start, lanes, BLOCK)
    keys = _keys(entries)
    key, ties = tl.load(state + KEY).to(tl.int32), tl.load(state + LEFT)
    above = tl.load(upto + block - 1, mask=block > 0, other=0)
    tied = tl.load(upto + blocks + block - 1, mask=block > 0, other=0)
    equal = (used & (keys == key)).to(tl.int32)
    left = _within(ties, tied, BLOCK)
    belongs = (used & (keys > key)) | ((equal == 1) & (tl.cumsum(equal, 0) <= left))
    chosen = belongs.to(tl.int32)
    first = above + tl.minimum(tied, ties)
    at = tl.cumsum(chosen, 0) - chosen
    tl.store(out_values + first + at, entries, mask=belongs)
    if few > 0:
        noted = tl.load(positions + start + lanes, mask=belongs, other=0)
        tl.store(out_positions + first + at, noted.to(tl.int64), mask=belongs)
    else:
        tl.store(out_positions + first + at, start + lanes, mask=belongs)


@triton.jit(do_not_specialize=["number", "size"])
def subtract(vector, indices, values, number, size, factor, SCALES: tl.constexpr, BLOCK: tl.constexpr):
    """Subtract values, times a factor, at indices; one outside the vector stops the card, as in torch.

    Who writes where: entry i of the list writes vector[indices[i]], and the indices are unique.
    """
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < number
    places = tl.load(indices + lanes, mask=inside, other=-1)
    tl.device_assert((places >= 0) & (places < size), "rtopk: an index lies outside the vector", mask=inside)
    inside = inside & (places >= 0) & (places < size)
    taken = tl.load(values + lanes, mask=inside, other=0.0).to(tl.float32)
    if SCALES:
        taken = taken * factor
    held = tl.load(vector + places, mask=inside, other=0.0)
    tl.store(vector + places, held - taken, mask=inside)
