"""Read streams of Golomb codes that strangers may have written.

`unpack` reads one stream with every check; what it refuses is refused. The length of a code is known only when it
is read, so one stream is bound by latency; `unpack_four` reads four at once, a block of each at a time, and leaves
to `unpack` every block that is not plain: near the end, beyond the limit, of large gaps. No byte outside the given
addresses is read, and time is proportional to the entries that the caller has made room for.
"""

import numpy as np

from rtopk.kernels.jit import Array, Num, fused, int64, loop, uint64
from rtopk.wire.bits import address, last_word, load_half, load_word, store_word, trailing_zeros
from rtopk.wire.golomb import BAD_STREAM, LENGTH_BITS, PARAMETERS, TABLED, remainder

WINDOW = 57  # bits that a word surely holds from any bit on
LENGTHS = (1 << LENGTH_BITS) - 1


@loop
def _window(base: Num, end: Num, bit: Num) -> Num:
    """Return a window of at least 57 bits from a bit on, zeros beyond the end."""
    at = base + (bit >> 3)
    word = load_word(at) if at + 8 <= end else last_word(at, end)
    return word >> uint64(bit & 7)


@loop
def _long_gap(base: Num, end: Num, bit: Num, m: Num, short: Num, escape: Num, limit: Num) -> Num:
    """Read a code that one window may not hold; return gap and next bit, or -1 if it passes the limit."""
    q = int64(0)
    while True:
        if bit >= 8 * (end - base) or q > limit // m:
            return int64(BAD_STREAM), bit
        zeros = min(trailing_zeros(_window(base, end, bit)), 56)
        q += zeros
        bit += zeros
        if zeros < 56:
            break
    tail = _window(base, end, bit + 1)
    r = int64(tail & ((uint64(1) << uint64(short)) - uint64(1)))
    bit += 1 + short
    if r >= escape:
        r = 2 * r - escape + int64((tail >> uint64(short)) & uint64(1))
        bit += 1
    return q * m + r, bit


@loop
def _gap(base: Num, end: Num, bit: Num, m: Num, short: Num, escape: Num, limit: Num) -> Num:
    """Read one code; return gap and next bit, gap -1 if it is not one."""
    at = base + (bit >> 3)
    if at + 8 <= end:
        word = load_word(at) >> uint64(bit & 7)  # at least 57 bits
        q = trailing_zeros(word)
        if q + short <= WINDOW - 2:
            word = (word >> uint64(q)) >> uint64(1)
            r = int64(word & ((uint64(1) << uint64(short)) - uint64(1)))
            more = int64(r >= escape)
            longer = r - escape + int64((word >> uint64(short)) & uint64(1))
            # chosen by a mask: the branch would be a coin flip
            return q * m + r + (longer & -more), bit + q + 1 + short + more
    return _long_gap(base, end, bit, m, short, escape, limit)


@loop
def _block(base: Num, end: Num, bit: Num, code: Num) -> Num:
    """Read the start of a block; return the next bit and the code."""
    word = _window(base, end, bit)
    if word & uint64(1):
        return bit + 9, int64((word >> uint64(1)) & uint64(255))
    return bit + 1, code


@loop
def unpack(
    data: Array,
    bit: Num,
    end: Num,
    shift: Num,
    code: Num,
    start: Num,
    limit: Num,
    out: Array,
) -> Num:
    """Fill out with ascending positions in [start, limit); return the bit after the stream, or -1; and the code."""
    base = address(data)
    end += base
    n, size, previous, wrong = len(out), 1 << shift, int64(start) - 1, int64(0)
    for begin in range(0, n, size):
        bit, code = _block(base, end, bit, code)
        m = PARAMETERS[code]
        short, escape = remainder(m)
        for i in range(begin, min(begin + size, n)):
            gap, bit = _gap(base, end, bit, m, short, escape, limit)
            wrong |= gap
            previous += gap + 1
            out[i] = previous
        # A gap is below 2**62 / 2**15, so a block cannot overflow before this looks at it.
        if wrong < 0 or previous >= limit or bit > 8 * (end - base):
            return int64(BAD_STREAM), code
    return bit, code


@fused
def _start(base: Num, end: Num, bit: Num, code: Num, tables: Num, offsets: Array) -> Num:
    """Read the start of a block; return the next bit, code, where its remainders are, their mask, and its unit."""
    bit, code = _block(base, end, bit, code)
    tabled = min(code, TABLED - 1)
    mask = uint64(offsets[tabled + 1] - offsets[tabled] - 1) << uint64(1)
    return bit, code, tables + 4 * offsets[tabled], mask, (PARAMETERS[tabled] << LENGTH_BITS) | 1


@fused
def _next(word: Num, table: Num, mask: Num, unit: Num) -> Num:
    """Take a code from a word; return the rest of the word, and 2**LENGTH_BITS x gap + length."""
    q = trailing_zeros(word)  # 64 if there is no one: longer than a window
    word >>= uint64(q & 63)
    entry = load_half(table + 2 * int64(word & mask))
    return word >> (entry & uint64(63)), int64(entry) + q * unit


@loop
def _with_care(base: Num, end: Num, state: Array, limit: Num, at: Num, stride: Num) -> Num:
    """Read four codes of any length from each stream and write their positions; say whether they were right."""
    for i in range(4):
        bit, m, previous = state[i, 0], PARAMETERS[state[i, 1]], state[i, 2]
        short, escape = remainder(m)
        for j in range(4):
            gap, bit = _gap(base, end, bit, m, short, escape, limit)
            if gap < 0:
                return False
            previous += gap + 1
            store_word(at + i * stride + 8 * j, uint64(previous))
        state[i, 0], state[i, 2] = bit, previous
    return True


@loop
def _plain_blocks(
    base: Num,
    end: Num,
    size: Num,
    limit: Num,
    tables: Num,
    offsets: Array,
    state: Array,
    at: Num,
    stride: Num,
) -> Num:
    """Read a block of each stream to address `at`, streams `stride` bytes apart; say whether they were plain.

    The rows of state are bit, code and last position of each stream. If the blocks were not plain, state and
    what was written mean nothing.
    """
    safe = 8 * (end - base - 8) - WINDOW * (size // 4)  # from here on a block of short codes stays inside
    b0, c0, t0, k0, u0 = _start(base, end, state[0, 0], state[0, 1], tables, offsets)
    b1, c1, t1, k1, u1 = _start(base, end, state[1, 0], state[1, 1], tables, offsets)
    b2, c2, t2, k2, u2 = _start(base, end, state[2, 0], state[2, 1], tables, offsets)
    b3, c3, t3, k3, u3 = _start(base, end, state[3, 0], state[3, 1], tables, offsets)
    if max(b0, b1, b2, b3) > safe or max(c0, c1, c2, c3) >= TABLED:
        return False
    state[0, 1], state[1, 1], state[2, 1], state[3, 1] = c0, c1, c2, c3
    p0, p1, p2, p3 = state[0, 2], state[1, 2], state[2, 2], state[3, 2]
    for i in range(at, at + 8 * size, 32):
        w0 = load_word(base + (b0 >> 3)) >> uint64(b0 & 7)
        w1 = load_word(base + (b1 >> 3)) >> uint64(b1 & 7)
        w2 = load_word(base + (b2 >> 3)) >> uint64(b2 & 7)
        w3 = load_word(base + (b3 >> 3)) >> uint64(b3 & 7)
        n0, n1, n2, n3 = int64(0), int64(0), int64(0), int64(0)
        q0, q1, q2, q3 = p0, p1, p2, p3
        for j in range(i, i + 32, 8):  # four codes from each word, right if they are no longer than a window
            w0, v0 = _next(w0, t0, k0, u0)
            w1, v1 = _next(w1, t1, k1, u1)
            w2, v2 = _next(w2, t2, k2, u2)
            w3, v3 = _next(w3, t3, k3, u3)
            n0, n1, n2, n3 = n0 + v0, n1 + v1, n2 + v2, n3 + v3
            q0, q1 = q0 + (v0 >> LENGTH_BITS) + 1, q1 + (v1 >> LENGTH_BITS) + 1
            q2, q3 = q2 + (v2 >> LENGTH_BITS) + 1, q3 + (v3 >> LENGTH_BITS) + 1
            store_word(j, uint64(q0))
            store_word(j + stride, uint64(q1))
            store_word(j + 2 * stride, uint64(q2))
            store_word(j + 3 * stride, uint64(q3))
        n0, n1, n2, n3 = n0 & LENGTHS, n1 & LENGTHS, n2 & LENGTHS, n3 & LENGTHS
        if max(n0, n1, n2, n3) <= WINDOW:
            b0, b1, b2, b3 = b0 + n0, b1 + n1, b2 + n2, b3 + n3
            p0, p1, p2, p3 = q0, q1, q2, q3
        else:
            state[0, 0], state[1, 0], state[2, 0], state[3, 0] = b0, b1, b2, b3
            state[0, 2], state[1, 2], state[2, 2], state[3, 2] = p0, p1, p2, p3
            if not _with_care(base, end, state, limit, i, stride):
                return False
            b0, b1, b2, b3 = state[0, 0], state[1, 0], state[2, 0], state[3, 0]
            p0, p1, p2, p3 = state[0, 2], state[1, 2], state[2, 2], state[3, 2]
            if max(b0, b1, b2, b3) > safe:
                return False
    state[0, 0], state[1, 0], state[2, 0], state[3, 0] = b0, b1, b2, b3
    state[0, 2], state[1, 2], state[2, 2], state[3, 2] = p0, p1, p2, p3
    return max(p0, p1, p2, p3) < limit


@loop
def unpack_four(
    data: Array,
    bits: Array,
    end: Num,
    shift: Num,
    code: Num,
    starts: Array,
    limit: Num,
    out: Array,
    share: Num,
    tables: Array,
    offsets: Array,
) -> Num:
    """Fill out from four streams of `share` positions, the last of fewer; write their last bits to bits.

    Returns 0, or -1 if a stream is not one.
    """
    base, n, size = address(data), len(out), 1 << shift
    state, before = np.empty((4, 3), np.int64), np.empty((4, 3), np.int64)  # bit, code, last position
    for i in range(4):
        state[i, 0], state[i, 1], state[i, 2] = bits[i], code, starts[i] - 1
    whole = n - 3 * share  # of the last stream
    room, step = address(tables), 8 * share
    for begin in range(0, share, size):
        before[:] = state
        to = address(out) + 8 * begin
        if 4 <= size <= whole - begin and _plain_blocks(
            base, base + end, size, limit, room, offsets, state, to, step
        ):
            continue
        for i in range(4):
            first, last = i * share + begin, min((i + 1) * share, n, i * share + begin + size)
            if first >= last:
                continue
            bit, code = before[i, 0], before[i, 1]
            bit, code = unpack(data, bit, end, shift, code, before[i, 2] + 1, limit, out[first:last])
            if bit < 0:
                return int64(BAD_STREAM)
            state[i, 0], state[i, 1], state[i, 2] = bit, code, out[last - 1]
    bits[:] = state[:, 0]
    return int64(0)
