"""Choose a backend for a test, triton's interpreter among them."""

from rtopk import kernels
from rtopk.kernels import device


def prefer(monkeypatch, name):
    """Use a backend wherever it serves, as RTOPK_BACKEND would have it; return it."""
    chosen = kernels.BACKENDS[name]
    monkeypatch.setattr(
        kernels, "_order", sorted(kernels.BACKENDS.values(), key=lambda found: found is not chosen)
    )
    monkeypatch.setattr(device, "_interpreted", lambda: name == "triton")
    return chosen
