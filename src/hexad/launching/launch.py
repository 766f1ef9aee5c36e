"""Joining the world this process was started in: torchrun's, SLURM's, or a world of one; with
``run.deterministic``, so that repeats of a run in one layout on the same devices agree bit for bit."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from hexad.comm import CommError, Trace, agreed, identical, merged
from hexad.config import Config, ConfigError, HexadError
from hexad.engine.language import compiles
from hexad.engine.modules import with_common_dtype
from hexad.parallel.expert.kinds import check_kind
from hexad.parallel.pointwise import missing_compiler
from hexad.planning import Resolved, check_config, resolve, working_layout
from hexad.topology.cluster import device_name, has_fp8
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from . import watch
from .binding import near_gpu
from .environment import Environment, environment
from .rendezvous import dismiss, meet

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_ALGORITHM = "NCCL_ALGO"
_FIXED = (":4096:8", ":16:8")
"""cuBLAS's workspaces that do not depend on which stream is free."""
_NO_IMPLEMENTATION = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic(requested: bool, device: torch.device) -> Iterator[None]:
    """Let torch choose deterministic algorithms where ``run.deterministic`` is wanted, and raise where an
    operator has none. On a CPU all operators in use are deterministic anyway.

    Raises:
        ConfigError: cuBLAS cannot be set up for it any more, or is set up otherwise.
    """
    if not requested:
        yield
        return
    if device.type == "cuda":
        _fix_workspace()
    cuda, memory = torch.backends.cuda, cast(Any, torch.utils.deterministic)
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with ExitStack() as restored:
        restored.callback(torch.use_deterministic_algorithms, enabled, warn_only=warns)
        torch.use_deterministic_algorithms(True)
        # Nothing reads memory before it is written; filling it would cost a pass over every temporary.
        restored.callback(setattr, memory, "fill_uninitialized_memory", memory.fill_uninitialized_memory)
        memory.fill_uninitialized_memory = False
        # Their backward passes add up in any order; the flash kernel and plain products can do without.
        restored.callback(cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled())
        cuda.enable_mem_efficient_sdp(False)
        restored.callback(cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled())
        cuda.enable_cudnn_sdp(False)
        if device.type == "cuda" and _ALGORITHM not in os.environ:
            # Sums of other algorithms depend on where buffers are.
            os.environ[_ALGORITHM] = "Ring"
            restored.callback(os.environ.pop, _ALGORITHM, None)
        yield


def _fix_workspace() -> None:
    """Set cuBLAS's workspace, which is read when CUDA starts."""
    setting = os.environ.get(_WORKSPACE)
    if setting is None and torch.cuda.is_initialized():
        raise ConfigError(
            "run.deterministic",
            f"found true after CUDA has started without {_WORKSPACE}; set it to {_FIXED[0]} beforehand",
        )
    if setting not in (None, *_FIXED):
        raise ConfigError(
            "run.deterministic",
            f"found true with {_WORKSPACE}={setting} in the environment; remove it, or set {_FIXED[0]}",
        )
    os.environ[_WORKSPACE] = setting or _FIXED[0]


@contextmanager
def naming_operators() -> Iterator[None]:
    """Around a step: an operator without a deterministic implementation is a setting's error.

    Raises:
        ConfigError: names the operator.
    """
    try:
        yield
    except RuntimeError as error:
        match = _NO_IMPLEMENTATION.search(str(error))
        if match is None:
            raise
        raise ConfigError(
            "run.deterministic",
            f"found true, but {match[1]} has no deterministic implementation on this device; set it to false",
        ) from error


log = logging.getLogger(__name__)
T = TypeVar("T")

_LARGEST_MESH = 64
"""Ranks up to which gloo's process groups are connected when they are made: a lost peer is noticed sooner."""


@dataclass(frozen=True)
class Run:
    """A launched run: the mesh, this process's environment, and the resolved configuration."""

    mesh: Mesh
    environment: Environment
    resolved: Resolved

    def resuming(self) -> Run:
        """This run with ``checkpoint.resume: auto``."""
        config = self.resolved.config
        checkpoint = config.checkpoint.model_copy(update={"resume": "auto"})
        config = config.model_copy(update={"checkpoint": checkpoint})
        return replace(self, resolved=replace(self.resolved, config=config))

    def agreed(self, action: Callable[[], T]) -> T:
        """Do something on every rank; if any rank meets a user's error, all raise it.

        Raises:
            AgreedError: the first rank's error, on every rank alike.
        """
        return agreed(action, self.mesh.world)

    def identical(self, what: str, value: object) -> None:
        """Check that all ranks have the same value.

        Raises:
            AgreedError: they do not; names two ranks and what they have.
        """
        identical(what, value, self.mesh.world)


def pick_device(setting: str, here: Environment) -> torch.device:
    """The device of ``run.device`` for this process.

    Raises:
        ConfigError: ``cuda`` without a GPU, or with fewer GPUs than local ranks; on all ranks of the host.
    """
    available = torch.cuda.is_available()
    if setting == "cpu" or (setting == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError("run.device", "found cuda, but no GPU is visible; use auto or cpu")
    visible = torch.cuda.device_count()
    if here.launcher == "slurm" and visible == 1:
        return torch.device("cuda", 0)  # each task was given a GPU of its own (--gpus-per-task)
    if max(here.local_world, here.local_rank + 1) > visible:
        raise ConfigError(
            "run.device",
            f"found {setting}, but {here.local_world} ranks of this host share {visible} visible GPUs; start "
            "fewer ranks per host, or use cpu",
        )
    return torch.device("cuda", here.local_rank)


_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OTHER_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Older names of it, which have precedence."""
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_SERIALIZED = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
_GLOO = "GLOO_SOCKET_IFNAME"
_COMPILERS, _MOST_COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS", 32  # torch's own limit


def start_on(device: torch.device) -> None:
    """Make a GPU the current one. PyTorch's allocator will reserve memory in segments that can grow, of which
    less is lost to fragmentation, unless the user has set it up otherwise."""
    # It advises what a mesh does: messages have communicators of their own (Axis.to_next).
    os.environ.setdefault(_SERIALIZED, "false")
    # Read when CUDA starts; ROCm has no such segments.
    if torch.version.hip is None and not any(name in os.environ for name in (_ALLOCATOR, *_OTHER_NAMES)):
        os.environ[_ALLOCATOR] = "expandable_segments:True"
    torch.cuda.set_device(device)


def warn_of_one_queue(mesh: Mesh) -> None:
    """Log, on the first rank, that an environment variable delays the messages of a pipeline on GPUs."""
    if mesh.device.type == "cuda" and mesh.pipeline.size > 1 and os.environ.get(_QUEUES) == "1":
        text = (
            "%s is 1 (Megatron-LM's scripts set it): a GPU takes the work of all streams from one queue, so "
            "that pipeline messages and computation wait for each other; unset it"
        )
        if mesh.rank == 0:
            log.warning(text, _QUEUES)


def check_device(config: Config, device: torch.device) -> None:
    """Refuse number formats that the device cannot multiply, and dispatchers of rows to experts that it lacks
    something for.

    Raises:
        ConfigError: ``precision.dtype: fp8`` on a device without units for it; such a dispatcher.
    """
    moe, parallel = config.model.moe, config.parallel
    divided = parallel.expert * parallel.expert_tensor > 1
    if moe is not None and moe.dispatcher != "auto" and divided:
        check_kind(moe.dispatcher, device)
    if config.precision.dtype == "fp8" and not has_fp8(device):
        raise ConfigError(
            "precision.dtype",
            f"found fp8, but this device ({device_name(device)}) has no fp8 matrix units; use bf16",
        )


def compiled_alike(config: Config, mesh: Mesh) -> Config:
    """``run.compile: auto`` becomes ``none`` where a host lacks what GPUs need for it: ranks that compute in
    different ways would wait for each other, and round differently. All ranks call this together.

    Raises:
        AgreedError: another setting, and a rank lacks what it needs.
    """
    if config.run.compile != "auto" or mesh.device.type == "cpu":
        agreed(lambda: compiles(config.run, mesh.device), mesh.world)
        return config
    missing = missing_compiler(mesh.device)
    lacking = merged([(mesh.rank, missing)] if missing else [], mesh.world, lambda a, b: (a + b)[:1])
    if not lacking:
        return config
    if mesh.rank == 0:
        rank, what = lacking[0]
        log.warning("run.compile auto: functions are not compiled: rank %d lacks %s", rank, what)
    return config.model_copy(update={"run": config.run.model_copy(update={"compile": "none"})})


def resolved_alike(config: Config, mesh: Mesh) -> Resolved:
    """A checked configuration with a number for every ``auto``, the same on all ranks, which call this
    together.

    Raises:
        AgreedError: it does not fit a rank's device or files, or ranks differ in what they were given.
    """
    # Hosts may have different devices, and read files of their own: agreed, not each for itself.
    agreed(lambda: check_device(config, mesh.device), mesh.world)
    common = with_common_dtype(compiled_alike(config, mesh), mesh)
    resolved = agreed(lambda: resolve(common, mesh.layout), mesh.world)
    # Nothing later would notice a difference.
    identical("torch", str(torch.__version__), mesh.world)
    identical("settings", resolved.config.model_dump(mode="json", by_alias=True), mesh.world)
    if config.parallel.schedule.endswith(".json"):
        content = Path(config.parallel.schedule).read_bytes()
        digest = sha256(content).hexdigest()[:12]
        identical("parallel.schedule's file", f"one with SHA-256 {digest}", mesh.world)
    warn_of_one_queue(mesh)
    return resolved


@contextmanager
def launch(config: Config) -> Iterator[Run]:
    """Join the world, check the configuration against it, build the mesh; leave the world afterwards.

    Raises:
        ConfigError: settings that do not fit the world, before any process group is made.
        HexadError: what is given is no configuration, the rendezvous failed (a port in use, an unreachable
            host), or the layout has no work for this rank (``faults.idle_ranks``; see
            :func:`hexad.launching.rendezvous.wait_idle`).
        CommError: a rank that had been there is gone.
    """
    if not isinstance(config, Config):
        raise HexadError(f"config: found {config!r}, expected what hexad.load_config returns")
    here = environment()
    layout = working_layout(config, here.world)
    check_config(config, layout)
    if here.rank >= layout.world:
        raise HexadError(f"rank {here.rank}: only the first {layout.world} of {here.world} ranks have work")
    device = pick_device(config.run.device, here)
    with deterministic(config.run.deterministic, device):
        yield from _joined(config, here, layout, device)


def _joined(config: Config, here: Environment, layout: Layout, device: torch.device) -> Iterator[Run]:
    """The world of this process, until the caller is done."""
    if device.type == "cuda":
        start_on(device)
    bound_compilers(os.environ, here.local_world)
    offload = config.memory.offload == "optimizer"
    with (
        _threads(host_threads(os.environ, here.local_world, offload)),
        near_gpu(device, config.run.cpu_binding),
        _near(here),
    ):
        yield from _met(config, here, layout, device)


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """So many threads of the host, as long as this lasts; None changes nothing."""
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)


@contextmanager
def _near(here: Environment) -> Iterator[None]:
    """Let gloo listen on the loopback interface only while all ranks are on this host, unless the user has
    set an interface."""
    name = _loopback() if here.world > 1 and here.alone_on_host else None
    if name is None or _GLOO in os.environ:
        yield
        return
    os.environ[_GLOO] = name
    try:
        yield
    finally:
        os.environ.pop(_GLOO, None)


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def _met(config: Config, here: Environment, layout: Layout, device: torch.device) -> Iterator[Run]:
    """The world of this process, with its meshes, until the caller is done."""
    store = None
    if here.world > 1:
        if device.type == "cuda":
            watch.enable_flight_recorder(config.run.dir, layout.world, config.run.timeout)
        store = _join(here, layout.world, device, config.run.timeout)
    idle = here.world - layout.world if here.rank == 0 else 0
    try:
        with _meeting():
            mesh = Mesh.create(layout, device, config.run.timeout, Trace())
        run = Run(mesh, here, resolved_alike(config, mesh))
        yield run
    except CommError:
        # Peers are gone. An orderly end would wait for collectives that they will never join; the process
        # ends at once instead (see hexad.cli.worker).
        raise
    except BaseException as error:
        if store is not None and idle and isinstance(error, HexadError):
            dismiss(store, idle, str(error))
        _leave(device, orderly=False)
        raise
    if store is not None and idle:
        dismiss(store, idle, "")
    _leave(device, orderly=True)


def _leave(device: torch.device, *, orderly: bool) -> None:
    """Leave the world. After an error NCCL's orderly end would wait for peers that may never answer."""
    if not dist.is_initialized():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if not orderly and device.type == "cuda" and abort is not None:
        abort()
    else:
        dist.destroy_process_group()
    let_threads_finish()


def let_threads_finish() -> None:
    """Let gloo's threads release the tensors of their last collectives, a moment after the results are there.
    They need Python for it: where it has ended by then, the process aborts ("terminate called")."""
    time.sleep(0.05)


def host_threads(environment: Mapping[str, str], local_world: int, offload: bool) -> int | None:
    """Threads of a rank on the host: its part of the cores; under SLURM, which may give each rank cores of
    its own, SLURM_CPUS_PER_TASK. None leaves the user's choice.

    The 1 that torchrun sets where the user has set nothing is not taken for a choice where the host updates
    the weights (``offload``).
    """
    threads = environment.get("OMP_NUM_THREADS")
    if threads is not None and not (offload and threads == "1"):
        return None
    return _cores(environment, local_world)


def _cores(environment: Mapping[str, str], local_world: int) -> int:
    """Cores of the host for each of its ranks; under SLURM those that a task has been given."""
    cores, per_task = len(os.sched_getaffinity(0)), environment.get("SLURM_CPUS_PER_TASK", "")
    if "RANK" not in environment and per_task.isdigit():
        return max(1, min(cores, int(per_task)))
    return max(1, cores // local_world)


def bound_compilers(environment: MutableMapping[str, str], local_world: int) -> None:
    """Let a rank's ``torch.compile`` start no more processes than the rank has cores, unless the user has set
    their number; torch's default is as many as the host has, up to 32, on each rank."""
    # Read when the compiler is imported, which nothing does before a function is compiled.
    environment.setdefault(_COMPILERS, str(min(_MOST_COMPILERS, _cores(environment, local_world))))


def _join(here: Environment, members: int, device: torch.device, timeout: float) -> dist.Store:
    """Make the default process group of the first ``members`` ranks; returns the store of all ranks."""
    store = meet(here, members, timeout)
    if members > _LARGEST_MESH:
        # gloo would connect every pair of ranks, in a group that only users' own code may need.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if members > 1:
        with _meeting():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=here.rank,
                world_size=members,
                timeout=timedelta(seconds=timeout),
                device_id=device if device.type == "cuda" else None,
            )
    return store


@contextmanager
def _meeting() -> Iterator[None]:
    """Turn torch's errors while groups are created into CommError: a restart may help."""
    try:
        yield
    except RuntimeError as error:  # torch's errors of stores and connections are among them
        raise CommError(f"the process group could not be set up: {error}") from error
