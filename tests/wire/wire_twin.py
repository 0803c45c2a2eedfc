"""A reader of payloads in plain Python, slow and obvious, written from docs/wire-format.md alone."""

import struct
from math import ceil

BLOCKS = {4: 512, 5: 512, 3: 256}
MASK = (1 << 64) - 1
P = [0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5]


def rotate(x, n):
    return ((x << n) | (x >> (64 - n))) & MASK


def xxh64(data, seed=0):
    def turn(state, word):
        return rotate((state + word * P[1]) & MASK, 31) * P[0] & MASK

    i = 0
    if len(data) >= 32:
        states = [(seed + P[0] + P[1]) & MASK, (seed + P[1]) & MASK, seed, (seed - P[0]) & MASK]
        while i + 32 <= len(data):
            states = [turn(s, w) for s, w in zip(states, struct.unpack_from("<4Q", data, i), strict=True)]
            i += 32
        h = sum(rotate(s, n) for s, n in zip(states, (1, 7, 12, 18), strict=True)) & MASK
        for s in states:
            h = ((h ^ turn(0, s)) * P[0] + P[3]) & MASK
    else:
        h = (seed + P[4]) & MASK
    h = (h + len(data)) & MASK
    for size, code in ((8, "<Q"), (4, "<I"), (1, "<B")):
        while i + size <= len(data):
            (word,) = struct.unpack_from(code, data, i)
            if size == 8:
                h = (rotate(h ^ turn(0, word), 27) * P[0] + P[3]) & MASK
            elif size == 4:
                h = (rotate(h ^ (word * P[0] & MASK), 23) * P[1] + P[2]) & MASK
            else:
                h = rotate(h ^ (word * P[4] & MASK), 11) * P[0] & MASK
            i += size
    h = (h ^ (h >> 33)) * P[1] & MASK
    h = (h ^ (h >> 29)) * P[2] & MASK
    return h ^ (h >> 32)


def float32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def upper_half(word):
    return struct.unpack("<f", struct.pack("<I", word << 16))[0]


class Bits:
    def __init__(self, data, byte):
        self.data, self.at = data, 8 * byte

    def take(self, n):
        value = 0
        for i in range(n):
            value |= (self.data[self.at >> 3] >> (self.at & 7) & 1) << i
            self.at += 1
        return value

    def fill_up(self):
        while self.at & 7:
            assert self.take(1) == 0


def read_values(form, data, at, n):
    """Return n values and the byte after their section."""
    if n == 0:
        return [], at
    if form == 0:
        return list(struct.unpack_from(f"<{n}f", data, at)), at + 4 * n
    if form == 1:
        (e,) = struct.unpack_from("<h", data, at)
        return [float32(x * 2.0**e) for x in struct.unpack_from(f"<{n}e", data, at + 2)], at + 2 + 2 * n
    if form == 2:
        return [upper_half(x) for x in struct.unpack_from(f"<{n}H", data, at)], at + 2 * n
    values = []
    while len(values) < n:
        count = min(BLOCKS[form], n - len(values))
        if form == 3:
            (scale,) = struct.unpack_from("<f", data, at)
            values += [float32(q * scale / 127) for q in struct.unpack_from(f"<{count}b", data, at + 4)]
            at += 4 + count
            continue
        width = 4 if form == 4 else 2
        levels = 2 ** (width - 1)
        magnitudes = [upper_half(x) for x in struct.unpack_from(f"<{levels}H", data, at)]
        bits = Bits(data, at + 2 * levels)
        for _ in range(count):
            magnitude = magnitudes[bits.take(width - 1)]
            values.append(-magnitude if bits.take(1) else magnitude)
        bits.fill_up()
        at = bits.at >> 3
    return values, at


def read_gaps(data, at, n):
    """Return n positions and the byte after them."""
    shift, four = data[at] & 15, data[at] >> 4
    block, result, first = 1 << shift, [], at + 2
    shares = [n]
    if four:
        share = ceil(ceil(n / 4) / block) * block
        shares, first = [share] * 3 + [n - 3 * share], at + 50
    bits = Bits(data, first)
    for stream, share in enumerate(shares):
        if stream:
            start, offset = struct.unpack_from("<QQ", data, at + 2 + 16 * (stream - 1))
            assert (start, at + offset) == (result[-1] + 1, bits.at >> 3)
        code = data[at + 1]
        for i in range(share):
            if i % block == 0 and bits.take(1):
                code = bits.take(8)
            m = code + 1 if code < 7 else (8 + (code - 7) % 8) * 2 ** ((code - 7) // 8)
            q = 0
            while not bits.take(1):
                q += 1
            r = 0
            if m > 1:
                b = (m - 1).bit_length()
                u = 2**b - m
                r = bits.take(b - 1)
                if r >= u:
                    r = 2 * r + bits.take(1) - u
            result.append((result[-1] + 1 if result else 0) + q * m + r)
        bits.fill_up()
    return result, bits.at >> 3


def decode(data):
    """Return d, positions and values."""
    magic, version, flags, index, form, d, h, t, _, checksum = struct.unpack_from("<4sBBBBQIIQQ", data)
    assert (magic, version, flags & ~1) == (b"rTpk", 1, 0)
    assert checksum == xxh64(data[40:], xxh64(data[:32]))
    head, at = read_values(form, data, 40, h)
    tail, at = read_values(form, data, at, t)
    limit = d - t
    if index == 0:
        positions = []
    elif index == 1:
        positions, at = read_gaps(data, at, h)
    elif index == 2:
        bits = Bits(data, at)
        positions = [p for p in range(limit) if bits.take(1)]
        bits.fill_up()
        at = bits.at >> 3
    else:
        absent, at = read_gaps(data, at, limit - h)
        positions = sorted(set(range(limit)) - set(absent))
    assert len(positions) == h
    assert not any(data[at:])
    assert flags or at == len(data)
    return d, [*positions, *range(limit, d)], head + tail
