"""The parts of a rank that trains on an accelerator: predicted from the bytes it moves, not measured.

Selection, averaging and writing are the traffic model's (`rtopk bench traffic`); what the host does (encoding, and
the owners' work of an all-reduce) is that of the machine that is given; between a rank and its link NCCL is
assumed, at the rate of the bus. Methods that no model covers are left out.
"""

from dataclasses import replace

from rtopk.studies.bench import traffic
from rtopk.tools.advise.machine import Line, Machine

DEVICES = {"cuda": 1.5, "a100": 2.0, "h100": 3.3}  # TB/s; "cuda" is the slowest of these
R_OVER_K = 2.0  # the default selector's
MESSAGE_MS = 0.05  # of a step of an NCCL ring over sockets, beyond the link's latency: assumed
# Bytes for each entry of a gradient. fp16: cast there and back. PowerSGD reads the sum of gradient and error for
# either factor, and writes its approximation and the new error: a lower limit, which favours it.
RIVALS = {"dense": 0.0, "fp16": 12.0, "powersgd-1": 36.0, "powersgd-2": 36.0}


def check_device(name: str) -> None:
    """Raise ValueError for a device that is not known."""
    if name not in ("cpu", *DEVICES):
        raise ValueError(f"device must be one of cpu, {', '.join(DEVICES)}, got {name!r}")


def on_device(machine: Machine, name: str) -> Machine:
    """Return the machine with an accelerator; itself for "cpu"."""
    check_device(name)
    if name == "cpu":
        return machine
    rate = DEVICES[name]

    def line(*stages: traffic.Stage) -> Line:
        moved = [stage.bytes(1, 0.0) for stage in stages], [stage.bytes(1, 1.0, R_OVER_K) for stage in stages]
        entry, sent = sum(moved[0]) / rate / 1e3, (sum(moved[1]) - sum(moved[0])) / rate / 1e3
        return Line(entry, sent, fixed=1e9 * traffic.LAUNCH * sum(stage.launches for stage in stages))

    hook, copies = traffic.STEPS["the hook, fp32 gradient"][:-1], 2e9 * traffic.CALL
    mean = line(traffic.average_stage(1))
    down, up = 12e9 / traffic.PCIE, 12e9 / traffic.PCIE  # ns an entry: position and value
    return replace(
        machine,
        name=f"{machine.name}, with {name} ({rate} TB/s): predicted, not run on a GPU",
        select={method: Line(moved / rate / 1e3) for method, moved in RIVALS.items()}
        | {"rtopk": line(*hook)},
        encode={values: Line(0.0, cost.sent + down, fixed=copies) for values, cost in machine.encode.items()},
        average={
            values: Line(0.0, 1e9 * traffic.DECODE + up + mean.sent, fixed=copies + mean.fixed)
            for values in machine.average
        },
        byte_ns=1e9 / traffic.PCIE,
        message_ms=MESSAGE_MS,
        host=machine,
    )
