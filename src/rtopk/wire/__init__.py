"""The parts of a payload: positions (Golomb codes of gaps, or a bitmap), values in six forms, the checksum.

`rtopk.codec` combines them; `docs/wire-format.md` specifies every byte. Nothing here depends on the header. The
bit loops are compiled by numba at first use (and cached on disk), release the GIL, and never read or write outside
their array, whatever the bytes contain.
"""


class PayloadError(ValueError):
    """A payload that the receiver cannot accept; the message says why."""
