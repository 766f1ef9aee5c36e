"""A SLURM cluster on this machine: a controller and nodes, each a host in a network namespace. Linux, root,
Debian's packages slurm-wlm, munge and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..training import hosts

CONTROLLER = 0
"""The host of slurmctld and of the commands; nodes are the others, ``node1`` and so on."""

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=login({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={where}/munge.socket,cred_expire=15
CredType=cred/munge
StateSaveLocation={where}/state
SlurmdSpoolDir={where}/spool-%n
SlurmctldPidFile={where}/slurmctld.pid
SlurmdPidFile={where}/slurmd-%n.pid
SlurmctldLogFile={where}/slurmctld.log
SlurmdLogFile={where}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=5
MinJobAge=600
ReturnToService=2
JobRequeue=1
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no cluster here, in one line; None if there can."""
    missing = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]
    if missing:
        return f"not found: {', '.join(missing)}; install slurm-wlm and munge"
    return hosts.why_not()


class Slurm:
    """A running cluster.

    Args:
        where: an empty directory for configuration, state and logs.
        nodes: nodes, of ``cores`` cores each, whatever this machine has.
    """

    def __init__(self, where: Path, nodes: int, cores: int = 2) -> None:
        self._where, self.nodes, self._cores = where, nodes, cores
        self._hosts = hosts.Hosts(nodes + 1)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Slurm:
        self._where.mkdir(parents=True, exist_ok=True)
        self._hosts.__enter__()
        try:
            self._configure()
            self._start_munge()
            (self._where / "state").mkdir()
            self._start("slurmctld", CONTROLLER, ["slurmctld", "-D"])
            for node in range(1, self.nodes + 1):
                self.start_node(node)
            self.wait_for(lambda: self.run("sinfo", "-h", "-o", "%T %D").strip() == f"idle {self.nodes}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        for path in self._where.glob("munged.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), 9)
        self._hosts.__exit__()

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """Standard output of a command on the controller's host, such as ``sbatch``."""
        done = subprocess.run(
            self.on(CONTROLLER, *command),
            env=self.environment(variables),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def on(self, host: int, *command: str) -> list[str]:
        """A command that runs another one on a host, under the host's name,
        which all hosts know."""
        name = "login" if host == CONTROLLER else f"node{host}"
        # `ip netns exec` would also replace /sys, whose control groups slurmd needs.
        network = f"--net=/run/netns/{self._hosts.space(host)}"
        prepared = f'hostname {name}; mount --bind {self._where}/hosts /etc/hosts; exec "$@"'
        spaces = ["nsenter", network, "unshare", "--uts", "--mount"]
        return [*spaces, "sh", "-c", prepared, "sh", *command]

    def environment(self, variables: Mapping[str, str] = {}) -> dict[str, str]:
        """Variables of commands on the controller's host."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**inherited, "SLURM_CONF": str(self._where / "slurm.conf"), **variables}

    def start_node(self, node: int) -> None:
        """Start a node's daemon."""
        self._start(f"slurmd-{node}", node, ["slurmd", "-D", "-N", f"node{node}"])

    def lose_node(self, node: int) -> None:
        """End a node at once, with all that runs on it, and take it off the network."""
        self._hosts.cut(node)
        inside = subprocess.run(
            ["ip", "netns", "pids", self._hosts.space(node)], capture_output=True, text=True
        )
        for process in inside.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), 9)
        self._daemons.pop(f"slurmd-{node}").wait()

    def recover_node(self, node: int) -> None:
        """Bring a lost node back."""
        self._hosts.join(node)
        self.start_node(node)
        self.wait_for(lambda: self.run("sinfo", "-h", "-n", f"node{node}", "-o", "%T").strip() == "idle")

    def state(self, job: str) -> str:
        """A job's state, such as ``RUNNING``."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``."""
        words = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    @staticmethod
    def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait until a condition holds; fails after far more seconds than it takes on a busy machine."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it has not become true"
            time.sleep(0.3)

    def _configure(self) -> None:
        lines = [
            f"NodeName=node{node} NodeAddr={self._hosts.address(node)} CPUs={self._cores} RealMemory=4000"
            for node in range(1, self.nodes + 1)
        ]
        text = CONFIGURATION.format(
            controller=self._hosts.address(CONTROLLER), where=self._where, nodes="\n".join(lines)
        )
        (self._where / "slurm.conf").write_text(text)
        names = ["127.0.0.1 localhost", f"{self._hosts.address(CONTROLLER)} login"]
        names += [f"{self._hosts.address(node)} node{node}" for node in range(1, self.nodes + 1)]
        (self._where / "hosts").write_text("\n".join(names) + "\n")

    def _start_munge(self) -> None:
        """The daemon that signs messages. Its socket is a file, which all namespaces see."""
        key = self._where / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        options = {
            "key-file": key,
            "socket": self._where / "munge.socket",
            "pid-file": self._where / "munged.pid",
        }
        options |= {"log-file": self._where / "munged.log", "seed-file": self._where / "munge.seed"}
        words = [f"--{name}={value}" for name, value in options.items()]
        subprocess.run(["munged", "--force", *words], check=True, capture_output=True)

    def _start(self, name: str, host: int, command: list[str]) -> None:
        log = (self._where / f"{name}.out").open("wb")
        with log:
            self._daemons[name] = subprocess.Popen(
                self.on(host, *command), env=self.environment(), stdout=log, stderr=log
            )
