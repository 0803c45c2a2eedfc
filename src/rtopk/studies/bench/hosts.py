"""Hosts on one machine: network namespaces joined by a bridge, each link shaped in both directions.

Every host has one veth into a namespace that holds the bridge; `tc tbf` on both ends limits what goes in and
out. Names carry the process id, so runs do not meet. A watcher removes everything when this process ends,
also by SIGKILL, and hosts whose maker is gone are removed before new ones are made. Needs root and iproute2.
"""

import ipaddress
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PREFIX = "rtopk"
SUBNET = ipaddress.ip_network("10.77.0.0/24")  # seen only inside the namespaces
INTERFACE = "link0"  # of each host
LATENCY = "50ms"  # longest wait in the queue of a shaped link
MOST = 64  # hosts; more would need a larger subnet and a larger machine

# Ends what still runs in the namespaces of one maker, by process id, and removes them.
CLEAN = """
for name in "$@"; do
    for pid in $(ip netns pids "$name" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
done
for name in "$@"; do ip netns delete "$name" 2>/dev/null; done
exit 0
"""
WATCH = "cat >/dev/null\n" + CLEAN  # standard input ends when the maker does


class HostsUnavailableError(RuntimeError):
    """This machine cannot make hosts; the message says why and what to do."""


def unavailable_reason() -> str | None:
    """Say what is missing to make hosts, or None."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return f"making network namespaces needs root, this is user {os.geteuid()}"
    name = f"{PREFIX}-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"this kernel or container does not allow network namespaces: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return None


def burst_bytes(mbit: float) -> int:
    """Return how many bytes a shaped link lets through at once: 2 ms of its rate, at least 16 KB."""
    return max(16_384, round(mbit * 1e6 / 8 * 0.002))


class Hosts:
    """`count` hosts and the bridge between them; a context manager.

    >>> Hosts(1)
    Traceback (most recent call last):
    ...
    ValueError: count must be in [2, 64], got 1
    """

    def __init__(self, count: int) -> None:
        if not 2 <= count <= MOST:
            raise ValueError(f"count must be in [2, {MOST}], got {count}")
        self.names = [f"{PREFIX}-{os.getpid()}-{host}" for host in range(count)]
        self.bridge = f"{PREFIX}-{os.getpid()}-bridge"
        self.addresses = [str(SUBNET[host + 1]) for host in range(count)]
        self._watcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Hosts":
        reason = unavailable_reason()
        if reason is not None:
            raise HostsUnavailableError(
                f"{reason}. Without shaped links, use --loopback: all ranks on 127.0.0.1"
            )
        remove_stale()
        everything = [*self.names, self.bridge]
        self._watcher = subprocess.Popen(
            ["sh", "-c", WATCH, "watch", *everything],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach it
        )
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hosts, and whatever still runs in them."""
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.close()
            self._watcher.wait()
            self._watcher = None

    def _make(self) -> None:
        for name in (*self.names, self.bridge):
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link set lo up")
        _run(f"ip -n {self.bridge} link add br0 type bridge")
        _run(f"ip -n {self.bridge} link set br0 up")
        for host, name in enumerate(self.names):
            peer = f"peer name port{host} netns {self.bridge}"
            _run(f"ip -n {name} link add {INTERFACE} type veth {peer}")
            _run(f"ip -n {name} addr add {self.addresses[host]}/{SUBNET.prefixlen} dev {INTERFACE}")
            _run(f"ip -n {self.bridge} link set port{host} master br0 up")
            _run(f"ip -n {name} link set {INTERFACE} up")

    def shape(self, mbit: float | None) -> None:
        """Limit every host's link to `mbit` Mbit/s in each direction; None takes limits away."""
        if mbit is not None and not mbit > 0:
            raise ValueError(f"mbit must be positive, got {mbit}")
        for host, name in enumerate(self.names):
            for place, device in ((name, INTERFACE), (self.bridge, f"port{host}")):
                qdisc = f"dev {device} root"
                subprocess.run(f"tc -n {place} qdisc del {qdisc}".split(), capture_output=True)
                if mbit is not None:
                    limit = f"rate {round(mbit * 1000)}kbit burst {burst_bytes(mbit)} latency {LATENCY}"
                    _run(f"tc -n {place} qdisc add {qdisc} tbf {limit}")

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]


def received_bytes(interface: str) -> int:
    """Return the bytes that have come in at an interface of the namespace that this thread lives in."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[0])
    raise ValueError(f"there is no interface {interface!r} here")


def remove_stale() -> list[str]:
    """Remove hosts whose maker is no longer alive; return their names."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    stale = [
        name
        for name, pid in re.findall(rf"^({PREFIX}-(\d+)-\S+)", listed, re.MULTILINE)
        if not Path(f"/proc/{pid}").exists()
    ]
    if stale:
        subprocess.run(["sh", "-c", CLEAN, "clean", *stale], capture_output=True)
    return stale


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise HostsUnavailableError(f"`{command}` failed: {done.stderr.strip()}")
