"""Cuts processes off from each other with nftables, in a network namespace of their own."""

from __future__ import annotations

import re
import subprocess
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ROW = re.compile(r"^(\S+)\s+\d+\s+\d+\s+\S+:(\d+|\*)\s+\S+:(\d+|\*)\s.*pid=(\d+)")


class Connection(NamedTuple):
    """A TCP socket of a process: state, both ports (the remote one is 0 if it listens)."""

    state: str
    local: int
    remote: int
    pid: int


def connections() -> Iterator[Connection]:
    """Yield all TCP sockets of this network namespace."""
    told = subprocess.run(["ss", "-Htanp"], capture_output=True, text=True, check=True).stdout
    for line in told.splitlines():
        if found := _ROW.match(line):
            state, local, remote, pid = found.groups()
            yield Connection(state, int(local), 0 if remote == "*" else int(remote), int(pid))


def cut_off(pid: int, seconds: float) -> int:
    """Drop every packet from and to a process for a time. Connections that it opens meanwhile are cut too.

    Return the number of ports.
    """
    until = time.monotonic() + seconds
    with _Dropped() as dropped:
        while time.monotonic() < until:
            dropped.add(each.local for each in connections() if each.pid == pid)
            time.sleep(0.1)
        if not dropped.ports:
            raise RuntimeError(f"process {pid} has no connection")
        return len(dropped.ports)


def lose_events(selector: int, engines: set[int], seconds: float) -> int:
    """Drop the KV events that engines send to the selector for a time, then break the connections: they are lost.

    Return the number of connections.
    """
    listening = {each.local for each in connections() if each.pid in engines and each.state == "LISTEN"}
    of_events = [each for each in connections() if each.pid == selector and each.remote in listening]
    if not of_events:
        raise RuntimeError("the selector has no connection to an engine")
    with _Dropped() as dropped:
        dropped.add(each.local for each in of_events)
        time.sleep(seconds)
        for each in of_events:
            ends = f":{each.local}", f":{each.remote}"
            for first, second in (ends, ends[::-1]):
                subprocess.run(
                    ["ss", "-K", "-t", f"sport = {first} and dport = {second}"], capture_output=True, check=True
                )
    return len(of_events)


class _Dropped:
    """A set of ports whose packets are dropped."""

    def __enter__(self) -> _Dropped:
        _nft(
            "add table inet inlay_cut; add set inet inlay_cut ports { type inet_service; };"
            "add chain inet inlay_cut input { type filter hook input priority 0; };"
            "add rule inet inlay_cut input tcp sport @ports drop; add rule inet inlay_cut input tcp dport @ports drop"
        )
        self.ports: set[int] = set()
        return self

    def add(self, ports: Iterable[int]) -> None:
        """Drop the packets of further ports."""
        new = set(ports) - self.ports
        if new:
            _nft(f"add element inet inlay_cut ports {{ {', '.join(map(str, sorted(new)))} }}")
            self.ports |= new

    def __exit__(self, *_: object) -> None:
        _nft("delete table inet inlay_cut")


def _nft(commands: str) -> None:
    subprocess.run(["nft", commands], check=True)
