"""Hosts of their own on this machine: network namespaces on a bridge. Linux, root, iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .command import Process


def why_not() -> str | None:
    """Why hosts cannot be made here, in one line; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "not found: ip; install iproute2"
    done = subprocess.run(["ip", "netns", "add", f"hxtry{os.getpid()}"], capture_output=True, text=True)
    if done.returncode:
        return f"no network namespace can be made: {done.stderr.strip()}"
    _ip("netns", "delete", f"hxtry{os.getpid()}")
    return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Some hosts that reach each other; removed on leaving the context."""

    def __init__(self, count: int) -> None:
        self._mark = f"hx{os.getpid() % 100000}"
        self.count = count

    def __enter__(self) -> Hosts:
        try:
            _ip("netns", "add", f"{self._mark}-switch")
            _ip("-n", f"{self._mark}-switch", "link", "add", "bridge", "type", "bridge")
            _ip("-n", f"{self._mark}-switch", "link", "set", "bridge", "up")
            for host in range(self.count):
                space, port = self.space(host), f"port{host}"
                _ip("netns", "add", space)
                _ip("-n", space, "link", "set", "lo", "up")
                peer = ["peer", "name", port, "netns", f"{self._mark}-switch"]
                _ip("-n", space, "link", "add", "eth0", "type", "veth", *peer)
                _ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                _ip("-n", f"{self._mark}-switch", "link", "set", port, "master", "bridge", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*range(self.count), "switch"):
            subprocess.run(["ip", "netns", "delete", f"{self._mark}-{name}"], capture_output=True)

    def address(self, host: int) -> str:
        """In the network of all hosts."""
        return f"10.84.0.{host + 1}"

    def space(self, host: int) -> str:
        """The name of a host's namespace."""
        return f"{self._mark}-{host}"

    def prefix(self, host: int) -> list[str]:
        """The words before a command that run it on a host."""
        return ["ip", "netns", "exec", self.space(host)]

    def cut(self, host: int) -> None:
        """Take a host off the network."""
        _ip("-n", f"{self._mark}-switch", "link", "set", f"port{host}", "down")

    def join(self, host: int) -> None:
        """Bring a host that was cut back to the network."""
        _ip("-n", f"{self._mark}-switch", "link", "set", f"port{host}", "up")

    def torchrun(
        self, host: int, arguments: Sequence[str], where: Path, nodes: str, restarts: int = 0
    ) -> Process:
        """Start one host's torchrun, with one rank; they meet at the first host."""
        where.mkdir(parents=True)
        # Shorter than the defaults, which are made for clusters: how long a round waits for more hosts.
        times = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
        options = [
            *("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", str(restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.address(0)}:29400", "--rdzv-id", "hosts"),
            *("--rdzv-conf", f"is_host={int(host == 0)},{times}", "--local-addr", self.address(host)),
        ]
        module = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "hexad.cli.main", *arguments]
        environment = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return Process([*self.prefix(host), *module], where, environment)
