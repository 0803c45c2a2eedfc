"""A pytest plugin: torchft's tests find our DiLoCo, LocalSGD and process group where theirs are.

Everything is sent (density 1, fp32), so that results can be compared with theirs. The whole way is ours all the
same: memory, payload, all-gather and mean. The tests themselves are unchanged but for `let_newcomers_join`.
"""

import functools
import time

import torchft._torchft
import torchft.local_sgd
import torchft.process_group
from torchft.process_group import ProcessGroupGloo

import rtopk.torchft
import torchft

FOUND = {"allreduce": 0}
# In torchft's "upscale" tests a replica starts when the two others have made two of their four steps, all three
# from one barrier. As soon as all members of the last quorum ask again, the lighthouse makes a quorum at once,
# without waiting for a newcomer. So the newcomer's first request must overtake those of the others' last two
# rounds, some ten milliseconds; if it does not, they finish, and it waits in vain. Here the others wait before they
# go on, and once one has asked, the lighthouse waits longer for those that have not (also before the first quorum).
HEAD_START = 0.3  # seconds
JOIN_TIMEOUT = 1000  # milliseconds, for torchft's default of 100


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


def let_newcomers_join():
    from torchft.manager_integ_test import EventInjector, EventInjectorEvent

    check = EventInjector.check

    def check_and_wait(injector, rank, step):
        before = injector.count[EventInjectorEvent.Barrier]
        check(injector, rank, step)
        if step > 0 and injector.count[EventInjectorEvent.Barrier] > before:
            time.sleep(HEAD_START)

    EventInjector.check = check_and_wait
    torchft._torchft.LighthouseServer = functools.partial(
        torchft._torchft.LighthouseServer, join_timeout_ms=JOIN_TIMEOUT
    )


def pytest_configure(config):
    rtopk.torchft.Books.allreduce = counted
    torchft.process_group.ProcessGroupGloo = torchft.ProcessGroupGloo = Group
    torchft.local_sgd.DiLoCo, torchft.local_sgd.LocalSGD = DiLoCo, LocalSGD
    let_newcomers_join()  # imports torchft's tests, which must find ours


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"rtopk carried {FOUND['allreduce']} reductions")
