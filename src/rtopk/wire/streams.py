"""Read streams of Golomb codes that strangers may have written.

Two streams are read at once: the length of a code is known only when it is read, so one stream is bound by
latency, two by throughput; two more may keep another thread busy. No byte outside the given addresses is read,
no gap passes the limit, and time is proportional to the entries that the caller has made room for.
"""

from rtopk.wire.bits import address, last_word, load_word, store_word, trailing_zeros
from rtopk.wire.compiling import Array, Num, inlined, int64, loop, uint64
from rtopk.wire.golomb import BAD_STREAM, PARAMETERS, width


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


@inlined
def _gap(base: Num, end: Num, bit: Num, m: Num, short: Num, escape: Num, limit: Num) -> Num:
    """Read one code; return gap and next bit, gap -1 if it is not one."""
    at = base + (bit >> 3)
    if at + 8 <= end:
        word = load_word(at) >> uint64(bit & 7)  # at least 57 bits
        q = trailing_zeros(word)
        if q + short <= 55:
            word = (word >> uint64(q)) >> uint64(1)
            r = int64(word & ((uint64(1) << uint64(short)) - uint64(1)))
            more = int64(r >= escape)
            longer = r - escape + int64((word >> uint64(short)) & uint64(1))
            # chosen by a mask: the branch would be a coin flip
            return q * m + r + (longer & -more), bit + q + 1 + short + more
    return _long_gap(base, end, bit, m, short, escape, limit)


@loop
def _block(base: Num, end: Num, bit: Num, code: Num) -> Num:
    """Read the start of a block; return the next bit, code, M, bits of a short remainder, first long one."""
    word = _window(base, end, bit)
    bit += 1
    if word & uint64(1):
        code = int64((word >> uint64(1)) & uint64(255))
        bit += 8
    m = PARAMETERS[code]
    short = width(m) - 1 if m > 1 else 0
    escape = (int64(1) << int64(short + 1)) - m if m > 1 else int64(1)
    return bit, code, m, short, escape


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
    """Fill out with ascending positions in [start, limit); return the bit after the stream, or -1."""
    base = address(data)
    end += base
    n, size, previous, wrong = len(out), 1 << shift, int64(start) - 1, int64(0)
    for begin in range(0, n, size):
        bit, code, m, short, escape = _block(base, end, bit, code)
        for i in range(begin, min(begin + size, n)):
            gap, bit = _gap(base, end, bit, m, short, escape, limit)
            wrong |= gap
            previous += gap + 1
            out[i] = previous
        # A gap is below 2**62 / 2**15, so a block cannot overflow before this looks at it.
        if wrong < 0 or previous >= limit or bit > 8 * (end - base):
            return int64(BAD_STREAM)
    return bit


@loop
def unpack_two(
    data: Array,
    bits: Array,
    end: Num,
    shift: Num,
    code: Num,
    starts: Array,
    limit: Num,
    one: Array,
    two: Array,
) -> Num:
    """Fill two arrays, the first not the shorter one, from two streams; write their last bits to bits.

    Returns 0, or -1 if a stream is not one.
    """
    base, room = address(data), end
    end += base
    size, wrong = 1 << shift, int64(0)
    b0, b1, c0, c1 = bits[0], bits[1], int64(code), int64(code)
    p0, p1, to0, to1 = starts[0] - 1, starts[1] - 1, address(one), address(two)
    together = len(two) >> shift << shift
    for begin in range(0, together, size):
        b0, c0, m0, s0, e0 = _block(base, end, b0, c0)
        b1, c1, m1, s1, e1 = _block(base, end, b1, c1)
        for i in range(begin, begin + size):
            g0, b0 = _gap(base, end, b0, m0, s0, e0, limit)
            g1, b1 = _gap(base, end, b1, m1, s1, e1, limit)
            wrong |= g0 | g1
            p0 += g0 + 1
            p1 += g1 + 1
            store_word(to0 + 8 * i, uint64(p0))
            store_word(to1 + 8 * i, uint64(p1))
        if wrong < 0 or max(p0, p1) >= limit or max(b0, b1) > 8 * room:
            return int64(BAD_STREAM)
    bits[0] = unpack(data, b0, room, shift, c0, p0 + 1, limit, one[together:])
    bits[1] = unpack(data, b1, room, shift, c1, p1 + 1, limit, two[together:])
    return min(bits[0], bits[1], 0)
