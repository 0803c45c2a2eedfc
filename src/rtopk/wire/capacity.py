"""How many bytes positions may take in a payload of fixed size: known from h and d alone, on every rank.

Only additions, multiplications, divisions and square roots of float64, which IEEE 754 defines to the bit,
so that ranks on different machines agree.
"""

from functools import cache

from rtopk.wire.gaps import DIRECTORY, FOUR_STREAMS_FROM
from rtopk.wire.golomb import CODES, PARAMETERS

MARGIN = 5.0  # standard deviations of the length of h codes


def expected_bits(m: int, p: float) -> float:
    """Return the mean length of the code with parameter m for gaps of positions drawn with probability p."""
    stays = _power(1.0 - p, m)  # a gap reaches m
    if m == 1:
        return 1.0 + stays / (1.0 - stays)
    width = (m - 1).bit_length()
    longer = (_power(1.0 - p, (1 << width) - m) - stays) / (1.0 - stays)
    return 1.0 + stays / (1.0 - stays) + width - 1 + longer


@cache
def position_bytes(h: int, d: int) -> int:
    """Return room for h of d positions: uniform ones exceed it once in a million; never more than a bitmap.

    Real positions cluster and need less; those of an adversary may need more.
    """
    if h == 0:
        return 0
    bitmap = (d + 7) // 8
    if 2 * h > d:
        return bitmap
    p = h / d
    per_gap = min(expected_bits(int(PARAMETERS[code]), p) for code in _near(0.6931 / p))
    streams = 4 if h >= FOUR_STREAMS_FROM else 1
    fixed = 16 + (8 * DIRECTORY if streams == 4 else 0) + 8 * streams  # the streams end in whole bytes
    # A code's length has a standard deviation below 0.7 once the sum of all gaps is given; a block in a
    # few hundred names a new parameter.
    bits = h * (per_gap + 1 / 128 + 0.004) + MARGIN * 0.7 * float(h) ** 0.5 + fixed + 9
    return min(bitmap, int(bits) // 8 + 1)


def _near(m: float) -> range:
    """Return the codes around a parameter."""
    code = next((code for code in range(CODES) if PARAMETERS[code] >= m), CODES - 1)
    return range(max(0, code - 3), min(CODES, code + 3))


def _power(x: float, n: int) -> float:
    """Raise to a whole power by squaring: `**` may differ in the last bit between C libraries."""
    result = 1.0
    while n:
        if n & 1:
            result *= x
        x *= x
        n >>= 1
    return result
