"""Two network namespaces joined by a link of limited bandwidth. Linux, root, iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from statistics import median

from turns import Program, wall

_LIMITED = {"full": False, "overlapped": True, "at_once": True, "waiting": True, "alone": True, "free": False}
"""Kinds of steps, in the order of a round: whether the link has its limit."""


def why_not() -> str | None:
    """Why a link cannot be made here, in one line; None if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a link with limited bandwidth needs root (network namespaces, tc)"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"not found: {', '.join(missing)}; install iproute2" if missing else None


def run(*command: str, check: bool = True) -> None:
    """Run a command of iproute2; its words are raised if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Link:
    """A veth pair, an end in each of two namespaces; removed on leaving the context.

    Attributes:
        addresses: of the two ends.
        interfaces: their names.
    """

    def __init__(self) -> None:
        self._spaces = [f"hexad{os.getpid()}-{end}" for end in range(2)]
        self.interfaces = [f"hx{os.getpid()}-{end}" for end in range(2)]
        self.addresses = [f"10.83.0.{end + 1}" for end in range(2)]

    def __enter__(self) -> Link:
        try:
            for space in self._spaces:
                run("ip", "netns", "add", space)
                run("ip", "-n", space, "link", "set", "lo", "up")
            one, other = self._spaces
            peer = ["peer", "name", self.interfaces[1], "netns", other]
            run("ip", "-n", one, "link", "add", self.interfaces[0], "type", "veth", *peer)
            for space, interface, address in zip(self._spaces, self.interfaces, self.addresses):
                run("ip", "-n", space, "address", "add", f"{address}/24", "dev", interface)
                run("ip", "-n", space, "link", "set", interface, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for space in self._spaces:  # takes the interfaces along
            run("ip", "netns", "delete", space, check=False)

    def limit(self, megabits: float | None) -> None:
        """Let each direction carry this much per second; None for as much as it can."""
        for space, interface in zip(self._spaces, self.interfaces):
            device = ["dev", interface, "root"]
            if megabits is None:
                run("tc", "-n", space, "qdisc", "delete", *device, check=False)
                continue
            # A burst of a few milliseconds: shorter than any bucket, longer than the kernel's timer.
            burst = str(int(max(megabits * 1e6 / 8 * 0.002, 128 * 1024)))
            rate = ["tbf", "rate", f"{megabits}mbit", "burst", burst, "latency", "50ms"]
            run("tc", "-n", space, "qdisc", "replace", *device, *rate)

    def command(self, end: int, command: Sequence[str]) -> list[str]:
        """``command`` as it runs at one end."""
        inner = ["env", f"GLOO_SOCKET_IFNAME={self.interfaces[end]}", *command]
        return ["ip", "netns", "exec", self._spaces[end], *inner]

    def program(self, command: Sequence[str]) -> Program:
        """Two ranks that run ``command``, one at each end."""
        self.limit(None)
        return Program([self.command(end, command) for end in range(2)], address=self.addresses[0])

    def in_turns(
        self, program: Program, kinds: Sequence[str], rounds: int, megabits: float
    ) -> dict[str, list[float]]:
        """Seconds of the slower rank, of rounds with a step of each kind; ``full`` is ``overlapped`` over the
        link without its limit."""
        seconds: dict[str, list[float]] = {}
        for _ in range(rounds):
            for kind, limited in _LIMITED.items():
                if kind not in kinds:
                    continue
                self.limit(megabits if limited else None)
                step = program.step("overlapped" if kind == "full" else kind)
                skipped = any(rank.get("skipped") for rank in step)
                assert not skipped, "a step was skipped: its time says nothing"
                seconds.setdefault(kind, []).append(wall(step))
        return seconds


def exposed(seconds: dict[str, list[float]], kind: str) -> float:
    """Seconds of a step above those without messages, of the same round; the median."""
    return median(step - free for step, free in zip(seconds[kind], seconds["free"]))
