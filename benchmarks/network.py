"""Slow links between processes of one machine: a network namespace for each, joined by a bridge, their rates limited by `tc tbf`.

Namespaces belong to processes that the kernel ends with this one, whatever ends it, and all that is made lies inside of them: the bridge,
the links, the limits, the host names. Nothing is made, changed or removed outside. Needs root, and the commands ip, tc, unshare, nsenter
and setpriv.
"""

import itertools
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

UNLIMITED = math.inf
# glibc keeps what is freed, and all threads of a process share one arena: otherwise the fresh pages of each large array cost more than an
# update. The same for all methods.
KEEP_FREED = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_BURST_S, _BURST_LEAST, _BURST_MOST = 250e-6, 4_500, 128_000  # what passes unshaped: so many seconds of the rate, within so many bytes
_PACKET = 65_536  # bytes that TCP hands to a link at once, if it may
_QUEUE = 8_000_000  # bytes that wait at a link before packets are lost
_PORT = 5001
_TIES = ["setpriv", "--pdeathsig", "KILL"]  # ends a child when its parent ends


def read_rate(text: str) -> float:
    """Bit/s: "100Mbit", "1Gbit", "2.5e9", or "unlimited"."""
    if text.strip().lower() == "unlimited":
        return UNLIMITED
    found = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?) *([kmg]?)(?:bit(?:/s)?)?", text.strip().lower())
    rate = float(found[1]) * _UNITS.get(found[2], 1.0) if found else 0.0
    if not rate:
        raise ValueError(f"{text!r} is not a rate such as 100Mbit, 1Gbit, 2.5e9 (in bit/s) or unlimited")
    return rate


def show_rate(rate: float) -> str:
    """As a person writes it."""
    if rate == UNLIMITED:
        return "unlimited"
    unit, name = next(((unit, name) for name, unit in reversed(_UNITS.items()) if rate >= unit), (1.0, ""))
    return f"{rate / unit:g} {name.replace('m', 'M').replace('g', 'G')}bit/s"


def burst_bytes(rate: float) -> int:
    """What a link at rest lets pass at once: little against a sparse exchange, and enough to keep up the rate between two timer ticks."""
    return round(min(max(rate / 8 * _BURST_S, _BURST_LEAST), _BURST_MOST))


class Traffic(NamedTuple):
    """What a host has sent over its link so far."""

    bytes: int  # with the headers of Ethernet, IP and TCP
    packets: int  # as handed to the link; one may be many times as large as what a wire would take

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes - other.bytes, self.packets - other.packets)

    @property
    def headers(self) -> int:
        """Bytes of the headers: 14 of Ethernet, 20 of IPv4, 32 of TCP with time stamps, for each packet, with or without content."""
        return 66 * self.packets

    @property
    def payload(self) -> int:
        return self.bytes - self.headers


class Network:
    """Hosts 0 to n - 1, each at the end of a link of its own."""

    def __init__(self, hub: int, hosts: Sequence[int]) -> None:
        self._hub = hub  # the process whose namespace holds the bridge
        self._hosts = hosts  # those that hold a host each
        self._limited = False

    @property
    def size(self) -> int:
        return len(self._hosts)

    def inside(self, host: int) -> list[str]:
        """What to put before a command so that it runs on a host, and ends with this process."""
        return [*_TIES, *_enter(self._hosts[host]), "--uts"]

    def limit(self, rate: float) -> None:
        """Limits each link in both directions, or lifts the limits; connections last.

        Whole packets of TCP fit into a burst: to cut them up costs more time of the processors than all the rest. What arrives at a host
        was limited before, and waits only if several send to it at once, so that twice the burst there changes nothing else.
        """
        packet = _PACKET if rate == UNLIMITED else min(_PACKET, round(0.9 * burst_bytes(rate)))
        for host in self._hosts:
            _run(*_enter(host), "ip", "link", "set", "dev", "eth0", "gso_max_size", f"{packet}")
            _run(*_enter(host), "ip", "route", "flush", "cache")  # so that open connections look again
        for process, device, bursts in [(host, "eth0", 1) for host in self._hosts] + [(self._hub, f"port{i}", 2) for i in range(self.size)]:
            tc = [*_enter(process), "tc", "qdisc"]
            if rate < UNLIMITED:
                figures = {"rate": f"{rate:.0f}bit", "burst": f"{bursts * burst_bytes(rate)}", "limit": f"{_QUEUE}"}
                _run(*tc, "replace", "dev", device, "root", "tbf", *itertools.chain(*figures.items()))
            elif self._limited:
                _run(*tc, "del", "dev", device, "root")
        self._limited = rate < UNLIMITED

    def sent(self, host: int) -> Traffic:
        """Counted at the host's interface, behind its limit."""
        with open(f"/proc/{self._hosts[host]}/net/dev") as table:
            (line,) = (line for line in table if line.strip().startswith("eth0:"))
        figures = line.split(":")[1].split()
        return Traffic(int(figures[8]), int(figures[9]))

    def rates(self, sizes: Sequence[int], repeats: int = 5) -> list[float]:
        """Bit/s of payload that all links carry at once, each host sending to the next, for transfers of so many bytes.

        Of each link the median counts, and of the links the slowest.
        """
        started = []
        for host in range(self.size):
            command = [sys.executable, __file__, address((host + 1) % self.size), str(repeats), *map(str, sizes)]
            started.append(subprocess.Popen([*self.inside(host), *command], stdout=subprocess.PIPE, text=True))
        links = [json.loads(child.communicate()[0] or "null") for child in started]
        if any(child.returncode for child in started):
            raise OSError("a transfer that was to measure the rate of the links failed")
        return [8 * size / max(statistics.median(link[i]) for link in links) for i, size in enumerate(sizes)]


def address(host: int) -> str:
    return f"10.77.{host // 200}.{host % 200 + 1}"


@contextmanager
def network(size: int) -> Iterator[Network]:
    """Hosts joined by a bridge, without limits, until the context ends.

    Raises:
      PermissionError: without root.
      OSError: if this system doesn't let even root make them, or a command is missing.
    """
    if not hasattr(os, "geteuid") or os.geteuid():
        raise PermissionError("network namespaces need root: run this with sudo, or as root in a container with --privileged")
    with ExitStack() as stack:
        hub = stack.enter_context(_namespace("hub"))
        _run(*_enter(hub), "ip", "link", "add", "name", "bridge0", "type", "bridge")
        _run(*_enter(hub), "ip", "link", "set", "bridge0", "up")
        hosts = [stack.enter_context(_namespace(address(i))) for i in range(size)]
        for i, host in enumerate(hosts):
            _run(*_enter(hub), "ip", "link", "add", "name", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", f"{host}")
            _run(*_enter(hub), "ip", "link", "set", f"port{i}", "master", "bridge0", "up")
            _run(*_enter(host), "ip", "address", "add", f"{address(i)}/16", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run(*_enter(host), "ip", "link", "set", device, "up")
        yield Network(hub, hosts)


@contextmanager
def _namespace(name: str) -> Iterator[int]:
    """A process with a network and a host name of its own.

    The name is the address, so that whoever looks up its own host name, as gloo does, finds the link and not the loopback device.
    """
    script = f"hostname {name} && echo && exec sleep infinity"
    command = [*_TIES, "unshare", "--net", "--uts", "sh", "-c", script]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout
    assert child.stderr
    try:
        if not child.stdout.readline():
            raise OSError(f"can't make a network namespace: {child.stderr.read().strip()}")
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def _enter(process: int) -> list[str]:
    return ["nsenter", "--target", f"{process}", "--net"]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _serve(listener: socket.socket, sizes: Sequence[int]) -> None:
    """Takes one transfer after the other, and confirms each with a byte."""
    with listener.accept()[0] as link:
        buffer = memoryview(bytearray(2**20))
        for size in sizes:
            left = size
            while left:
                left -= link.recv_into(buffer, min(left, len(buffer)))
            link.sendall(b"!")


def _transfer() -> None:
    """`python network.py ADDRESS REPEATS SIZE...`: seconds of transfers to the next host, while another one sends to this one."""
    peer, repeats, sizes = sys.argv[1], int(sys.argv[2]), [int(size) for size in sys.argv[3:]]
    transfers = [size for size in sizes for _ in range(repeats)]
    listener = socket.create_server(("", _PORT))
    server = threading.Thread(target=_serve, args=(listener, transfers), daemon=True)
    server.start()
    for attempt in itertools.count():
        try:
            link = socket.create_connection((peer, _PORT), timeout=60)
            break
        except ConnectionRefusedError:  # it isn't listening yet
            if attempt == 200:
                raise
            time.sleep(0.05)
    seconds = []
    for size in transfers:
        content = bytes(size)
        began = time.perf_counter()
        link.sendall(content)
        link.recv(1)
        seconds.append(time.perf_counter() - began)
    server.join()
    print(json.dumps([seconds[i * repeats : (i + 1) * repeats] for i in range(len(sizes))]))


if __name__ == "__main__":
    _transfer()
