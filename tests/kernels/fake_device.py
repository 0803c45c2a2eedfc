"""A device that is not there: its tensors live in host memory, and every wait and every byte across is counted.

`with FakeDevice() as device:` makes torch compute on it (it goes by the name of torch.device("meta")). What makes
the host of a real device wait is noted in `device.waits`: reading a number (`.item()`, `bool`, `float`), results
whose size depends on the data (`nonzero`, a mask as an index, `unique`), copies that are not asynchronous, and
indices in host memory, which torch copies so.
"""

import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")  # the one kind that every build knows, and nothing else here uses
aten = torch.ops.aten
SIZED_BY_DATA = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.unique_dim_consecutive.default,
    aten.bincount.default,
}
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}


class FakeTensor(torch.Tensor):
    """A tensor of that device; `inner` holds its entries."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    def __repr__(self):
        return f"FakeTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} is called outside of `with FakeDevice()`")


def unwrap(value):
    return value.inner if isinstance(value, FakeTensor) else value


class FakeDevice(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.begin()

    def begin(self):
        self.waits, self.down, self.up = [], 0, 0  # who waits; bytes to the host, bytes to the device
        self.launches = 0  # copies and calls that work on the device; not views, and not programs of triton

    def tensor(self, entries):
        return FakeTensor(entries.clone())

    def wait(self, func):
        ours = [line for line in traceback.extract_stack() if "/rtopk/" in line.filename][-1:]
        self.waits.append(f"{func} in {ours and (ours[0].filename, ours[0].lineno, ours[0].line)}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [*args, *kwargs.values()]
        flat = [part for value in given for part in (value if isinstance(value, list | tuple) else [value])]
        ours = [value for value in flat if isinstance(value, FakeTensor)]
        target = kwargs.get("device")
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        plain = tree_map(unwrap, args), tree_map(unwrap, kwargs)
        if func is aten._to_copy.default:
            return self._copied(func, args[0], target, kwargs.get("non_blocking"), plain)
        if func is aten.copy_.default:
            return self._copied_into(args, kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if not ours and (target is None or target.type == "cpu"):
            return func(*plain[0], **plain[1])
        self._check(func, args, ours)
        unsized = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func in SIZED_BY_DATA or func in READS or unsized:
            self.wait(func)
        made = func(*plain[0], **plain[1])
        self.launches += func._schema.is_mutable or self._is_new(func, made, ours)
        if func in READS or made is None:
            return made
        if func._schema.is_mutable:  # in place, or into `out`
            return kwargs["out"] if "out" in kwargs else args[0]
        return tree_map(lambda value: FakeTensor(value) if isinstance(value, torch.Tensor) else value, made)

    def _is_new(self, func, made, ours):
        known = {value.inner.untyped_storage().data_ptr() for value in ours}
        first = made[0] if isinstance(made, list | tuple) else made
        if not isinstance(first, torch.Tensor) or "empty" in func.__name__:
            return False
        return first.untyped_storage().data_ptr() not in known

    def _check(self, func, args, ours):
        """Refuse what a real device refuses: host tensors among its own, other than numbers and indices."""
        if func in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default):
            indices = [part for part in args[1] if part is not None]
            host = [part for part in indices if not isinstance(part, FakeTensor) and part.dim()]
            self.up += sum(part.nbytes for part in host)
            if host or any(part.dtype == torch.bool for part in indices):
                self.wait(func)
            return
        for value in args:
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.dim():
                raise RuntimeError(f"{func} got tensors on the host and on the device: {args}")

    def _copied(self, func, source, target, asynchronous, plain):
        here = isinstance(source, FakeTensor)
        there = here if target is None else target.type != "cpu"
        made = func(*plain[0], **plain[1])
        self.launches += here or there
        if here and not there:
            self.down += made.nbytes
        elif there and not here:
            self.up += made.nbytes
        if here != there and not asynchronous:
            self.wait(func)
        return FakeTensor(made) if there else made

    def _copied_into(self, args, asynchronous):
        into, source = args[:2]
        self.launches += isinstance(into, FakeTensor) or isinstance(source, FakeTensor)
        if isinstance(into, FakeTensor) != isinstance(source, FakeTensor):
            down = isinstance(source, FakeTensor)
            self.down, self.up = self.down + down * source.nbytes, self.up + (not down) * source.nbytes
            if not asynchronous:
                self.wait(aten.copy_.default)
        unwrap(into).copy_(unwrap(source))
        return into
