"""The parts of a payload: positions (Golomb codes of gaps, or a bitmap), values in six forms, the checksum.

`rtopk.codec` puts them together; `docs/wire-format.md` is the format byte by byte. Nothing here knows the
header. The bit loops are compiled by numba at first use (and cached on disk), release the GIL, and never
read or write outside the array they are given, whatever the bytes say.
"""


class PayloadError(ValueError):
    """A payload is not one that the receiver can accept; the message says why."""
