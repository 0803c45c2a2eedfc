"""A pytest plugin: torchft's tests find our DiLoCo, LocalSGD and process group where theirs are.

Everything is sent (density 1, fp32), so that results can be compared with theirs. The whole way is ours all the
same: memory, payload, all-gather and mean.
"""

import torchft.local_sgd
import torchft.process_group
from torchft.process_group import ProcessGroupGloo

import rtopk.torchft
import torchft

FOUND = {"allreduce": 0}


class Group(rtopk.torchft.ProcessGroup):
    def __init__(self, *args, **options):
        super().__init__(ProcessGroupGloo(*args, **options))


class DiLoCo(rtopk.torchft.DiLoCo):
    def __init__(self, *args, **options):
        super().__init__(*args, **options, density=1.0)


class LocalSGD(rtopk.torchft.LocalSGD):
    def __init__(self, *args, **options):
        super().__init__(*args, **options, density=1.0)


real = rtopk.torchft.Books.allreduce


def counted(books, update, group):
    FOUND["allreduce"] += 1
    return real(books, update, group)


def pytest_configure(config):
    rtopk.torchft.Books.allreduce = counted
    torchft.process_group.ProcessGroupGloo = torchft.ProcessGroupGloo = Group
    torchft.local_sgd.DiLoCo, torchft.local_sgd.LocalSGD = DiLoCo, LocalSGD


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"rtopk carried {FOUND['allreduce']} reductions")
