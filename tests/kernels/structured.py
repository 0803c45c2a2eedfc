"""Vectors with structure, because random ones reach the common branches only.

Each family draws magnitudes as keys, the bits of a float without its sign: ties, clusters that are dense in
units of the last place, few distinct values, powers of two, subnormals, sorted runs, one huge tensor beside
many tiny ones. `exact` is the definition that every selection is held to.
"""

import numpy as np

HALF, LAST = 0x3F000000, 0x7F7FFFFF  # the keys of 0.5 and of the largest finite float
WIDTHS = (1, 2, 64, 511, 512, 513, 1500, 2048, 2049, 1 << 15, 1 << 20)


def constant(rng, d):
    """One magnitude, zero among them."""
    return np.full(d, rng.choice([0, 1, HALF, LAST]))


def few_values(rng, d):
    """A handful of magnitudes, in any proportion."""
    values = rng.integers(0, LAST, rng.integers(2, 6))
    return rng.choice(values, d, p=rng.dirichlet(np.ones(len(values))))


def ulp_dense(rng, d):
    """A cluster a few units of the last place wide, others just above it, and some anywhere."""
    base, width = int(rng.integers(1 << 20, LAST - (1 << 22))), int(rng.choice(WIDTHS))
    keys = base + rng.integers(0, width, d)
    above = rng.random(d) < rng.choice([0.0, 0.01, 0.3])
    keys[above] = base + width + rng.integers(0, int(rng.choice(WIDTHS)), int(above.sum()))
    far = rng.random(d) < rng.choice([0.0, 0.001, 0.2])
    keys[far] = rng.integers(0, LAST, int(far.sum()))
    return keys


def aligned(rng, d):
    """A cluster that ends where a bin of the histogram ends."""
    base = int(rng.integers(1, 2000)) << 20
    return base + rng.integers(-int(rng.choice(WIDTHS)), int(rng.choice(WIDTHS)) + 1, d)


def powers_of_two(rng, d):
    """Exponents alone."""
    return rng.integers(1, rng.integers(2, 255), d) << 23


def subnormal(rng, d):
    """Magnitudes below the smallest normal float."""
    return rng.integers(0, int(rng.choice([2, 600, 3000, 1 << 23])), d)


def mostly_zero(rng, d):
    """Few entries that are not zero, fewer than r as a rule."""
    keys = np.zeros(d, np.int64)
    some = rng.integers(0, d, rng.integers(0, max(2, d // 100)))
    keys[some] = rng.integers(0, LAST, some.size)
    return keys


def blocks(rng, d):
    """Tensors of very different sizes, each with a scale of its own."""
    keys = np.abs(rng.standard_normal(d)).astype(np.float32)
    for start in np.sort(rng.integers(0, d, rng.integers(1, 20))):
        keys[start:] *= np.float32(2.0 ** rng.integers(-12, 10))
    keys[rng.integers(0, d) :] = keys[0]
    return np.nan_to_num(keys, posinf=1e30).view(np.int32).astype(np.int64)


def random(rng, d):
    """What the other tests draw: heavy tails."""
    return np.abs(rng.standard_normal(d) ** 3).astype(np.float32).view(np.int32).astype(np.int64)


FAMILIES = (
    constant, few_values, ulp_dense, aligned, powers_of_two, subnormal, mostly_zero, blocks, random,
)  # fmt: skip


def vector(rng, d, family=None):
    """Return the name of a vector and the vector, float32 and finite."""
    chosen = [family or FAMILIES[rng.integers(len(FAMILIES))]]
    if rng.random() < 0.3:
        chosen.append(FAMILIES[rng.integers(len(FAMILIES))])
    keys = chosen[0](rng, d)
    if len(chosen) == 2:  # the second begins somewhere, or lies between the entries of the first
        other = chosen[1](rng, d)
        mixed = np.arange(d) >= rng.integers(0, d) if rng.random() < 0.5 else rng.random(d) < 0.5
        keys = np.where(mixed, other, keys)
    order = rng.choice(["as drawn", "ascending", "descending"], p=[0.7, 0.15, 0.15])
    if order != "as drawn":
        keys = np.sort(keys) if order == "ascending" else np.sort(keys)[::-1]
    signs = rng.choice([0, 1, 2])  # all positive, all negative, both
    bits = np.clip(keys, 0, LAST).astype(np.uint32) | np.uint32(0x80000000) * (
        rng.integers(0, 2, d).astype(np.uint32) if signs == 2 else np.uint32(signs)
    )
    name = " + ".join(f.__name__ for f in chosen)
    return f"{name}, {order}, d={d}", bits.astype(np.uint32).view(np.float32)


def ranks(rng, d):
    """Return a number of entries in [1, d], the ends among them."""
    return int(min(d, max(1, rng.choice([1, 2, d, d - 1, rng.integers(1, d + 1), d // 100, d // 3]))))


def exact(values, r):
    """Return the positions of the r largest magnitudes, ascending; the lower index wins a tie."""
    keys = values.view(np.int32).astype(np.int64) & 0x7FFFFFFF
    return np.sort(np.argsort(-keys, kind="stable")[:r])
