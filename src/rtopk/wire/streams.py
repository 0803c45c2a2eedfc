"""Read streams of Golomb codes that strangers may have written.

`unpack` reads one stream with every check; what it refuses is refused. The length of a code is known only when it
is read, so one stream is bound by latency; `unpack_four` reads four at once, a block of each at a time, and leaves
to `unpack` every block that is not plain: near the end, beyond the limit, of large gaps. No byte outside the given
addresses is read, and time is proportional to the entries that the caller has made room for.
"""

import numpy as np

from rtopk.wire.bits import address, last_word, load_half, load_word, store_word, trailing_zeros
from rtopk.wire.compiling import Array, Num, inlined, int64, loop, uint64
from rtopk.wire.golomb import BAD_STREAM, PARAMETERS, TABLED, remainder

WINDOW = 57  # bits that a word surely holds from any bit on


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


@inlined
def _two(base: Num, bit: Num, table: Num, mask: Num, unit: Num) -> Num:
    """Read two codes from one word; return for each 256 x gap + length.

    The two are true if their lengths add up to at most WINDOW. No byte but those of the word is read.
    """
    word = load_word(base + (bit >> 3)) >> uint64(bit & 7)
    q = trailing_zeros(word)  # 64 if there is no one: too long by itself
    word >>= uint64(q & 63)
    entry = load_half(table + 2 * int64(word & mask))
    first = int64(entry) + q * unit
    word >>= entry & uint64(63)
    q = trailing_zeros(word)
    word >>= uint64(q & 63)
    return first, int64(load_half(table + 2 * int64(word & mask))) + q * unit


@inlined
def _put(at: Num, previous: Num, first: Num, second: Num) -> Num:
    """Write the next two positions; return the second."""
    previous += (first >> 8) + 1
    store_word(at, uint64(previous))
    previous += (second >> 8) + 1
    store_word(at + 8, uint64(previous))
    return previous


@inlined
def _start(base: Num, end: Num, bit: Num, code: Num, tables: Num, offsets: Array) -> Num:
    """Read the start of a block; return the next bit, code, where its remainders are, their mask, and its unit."""
    bit, code = _block(base, end, bit, code)
    tabled = min(code, TABLED - 1)
    mask = uint64(offsets[tabled + 1] - offsets[tabled] - 1) << uint64(1)
    return bit, code, tables + 4 * offsets[tabled], mask, (PARAMETERS[tabled] << 8) | 1


@loop
def _with_care(base: Num, end: Num, bit: Num, code: Num, limit: Num, previous: Num, at: Num) -> Num:
    """Read two codes of any length and write their positions; return the next bit, -1 if bad, and the second."""
    m = PARAMETERS[code]
    short, escape = remainder(m)
    first, bit = _gap(base, end, bit, m, short, escape, limit)
    second, bit = _gap(base, end, bit, m, short, escape, limit)
    previous += first + 1
    store_word(at, uint64(previous))
    previous += second + 1
    store_word(at + 8, uint64(previous))
    return (bit if min(first, second) >= 0 else int64(BAD_STREAM)), previous


@loop
def _plain_blocks(
    base: Num,
    end: Num,
    size: Num,
    limit: Num,
    tables: Num,
    offsets: Array,
    bits: Array,
    codes: Array,
    lasts: Array,
    at: Num,
    stride: Num,
) -> Num:
    """Read a block of each stream to address `at`, streams `stride` bytes apart; say whether they were plain.

    If they were not, what was written there means nothing, and bits, codes and lasts are as they were.
    """
    safe = 8 * (end - base - 8) - 9 - WINDOW * (size // 2)  # from here on a block of short codes stays inside
    b0, c0, t0, k0, u0 = _start(base, end, bits[0], codes[0], tables, offsets)
    b1, c1, t1, k1, u1 = _start(base, end, bits[1], codes[1], tables, offsets)
    b2, c2, t2, k2, u2 = _start(base, end, bits[2], codes[2], tables, offsets)
    b3, c3, t3, k3, u3 = _start(base, end, bits[3], codes[3], tables, offsets)
    if max(b0, b1, b2, b3) > safe or max(c0, c1, c2, c3) >= TABLED:
        return False
    p0, p1, p2, p3 = lasts[0], lasts[1], lasts[2], lasts[3]
    for i in range(at, at + 8 * size, 16):
        x0, y0 = _two(base, b0, t0, k0, u0)
        x1, y1 = _two(base, b1, t1, k1, u1)
        x2, y2 = _two(base, b2, t2, k2, u2)
        x3, y3 = _two(base, b3, t3, k3, u3)
        n0, n1, n2, n3 = (x0 + y0) & 255, (x1 + y1) & 255, (x2 + y2) & 255, (x3 + y3) & 255
        if (n0 + 6) | (n1 + 6) | (n2 + 6) | (n3 + 6) < 64:  # none is longer than WINDOW
            b0, b1, b2, b3 = b0 + n0, b1 + n1, b2 + n2, b3 + n3
            p0 = _put(i, p0, x0, y0)
            p1 = _put(i + stride, p1, x1, y1)
            p2 = _put(i + 2 * stride, p2, x2, y2)
            p3 = _put(i + 3 * stride, p3, x3, y3)
        else:
            b0, p0 = _with_care(base, end, b0, c0, limit, p0, i)
            b1, p1 = _with_care(base, end, b1, c1, limit, p1, i + stride)
            b2, p2 = _with_care(base, end, b2, c2, limit, p2, i + 2 * stride)
            b3, p3 = _with_care(base, end, b3, c3, limit, p3, i + 3 * stride)
            if min(b0, b1, b2, b3) < 0 or max(b0, b1, b2, b3) > safe:
                return False
    if max(p0, p1, p2, p3) >= limit:
        return False
    bits[0], bits[1], bits[2], bits[3] = b0, b1, b2, b3
    codes[0], codes[1], codes[2], codes[3] = c0, c1, c2, c3
    lasts[0], lasts[1], lasts[2], lasts[3] = p0, p1, p2, p3
    return True


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
    codes, lasts = np.full(4, code, np.int64), starts - 1
    whole = (n - 3 * share) >> shift << shift  # of each stream, in blocks of all four
    for begin in range(0, share, size):
        if 1 < size <= whole - begin and _plain_blocks(  # codes are read two at a time
            base,
            base + end,
            size,
            limit,
            address(tables),
            offsets,
            bits,
            codes,
            lasts,
            address(out) + 8 * begin,
            8 * share,
        ):
            continue
        for i in range(4):
            first, last = i * share + begin, min((i + 1) * share, n, i * share + begin + size)
            if first >= last:
                continue
            bits[i], codes[i] = unpack(
                data, bits[i], end, shift, codes[i], lasts[i] + 1, limit, out[first:last]
            )
            if bits[i] < 0:
                return int64(BAD_STREAM)
            lasts[i] = out[last - 1]
    return int64(0)
