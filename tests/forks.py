"""Python programs as forks of a server that has imported PyTorch and Hexad, in place of new interpreters.

A new interpreter spends seconds of CPU time on imports before the program begins; a fork has them. The server
is one process per process of tests. :class:`Program` is a :class:`subprocess.Popen` whose command is forked
from it, and so are the programs that such a fork starts, as its own children (the ranks of a launcher).

A fork stands for a new interpreter as far as a program can tell: arguments, environment, working directory,
standard streams, signals, session, ``__main__``, exit status. It differs in what is already imported. A
command that is no Python program, has options of the interpreter, or sets a variable that Python or PyTorch
reads when it starts, is executed as usual.
"""

import atexit
import functools
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import current_process
from pathlib import Path
from types import ModuleType
from typing import Any

PATIENCE = 900.0
"""Seconds after which a program that tests start is killed: many times what it takes on a busy machine."""

PRELOADED = (
    "torch._dynamo",
    "torch.distributed.nn",
    "torch.distributed.run",
    "lightning.pytorch",
    "hexad.training.loop",
    "hexad.cli.train",
    "hexad.cli.generate",
    "hexad.launching.local",
)
"""What the server imports, if it is installed; nothing in it starts threads."""
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "ATEN_", "LD_", "TORCH_LOGS")
"""Beginnings of the names of variables that are read once, when Python or PyTorch starts."""
ROOT = Path(__file__).parents[1]
_EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_GIVEN = _EXECUTE.__code__.co_varnames[1:]
_EXECV = os.execv
_PIPES = slice(_GIVEN.index("p2cread"), _GIVEN.index("errwrite") + 1)


class Program(subprocess.Popen[Any]):
    """A process whose command, if it is a Python program, is a fork of the server."""

    _connection: socket.socket | None = None

    def _execute_child(self, *arguments: Any) -> None:
        start = _Start.of(arguments)
        if start is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        self._connection, self.pid = fork(address(), start.request, start.streams)
        self._child_created = True
        self._close_pipe_fds(*arguments[_PIPES])  # type: ignore[attr-defined]

    def _internal_poll(self, **options: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(**options)  # type: ignore[misc,no-any-return]
        with suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._connection is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = status_of(self._connection)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._connection.close()
        return self.returncode


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    capture_output: bool = False,
    timeout: float | None = PATIENCE,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """What :func:`subprocess.run` does, for a :class:`Program`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Program(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _execute_as_fork(process: subprocess.Popen[Any], *arguments: Any) -> None:
    """Popen's method inside a fork: what it starts is its own fork, if the command is a Python program."""
    start = _Start.of(arguments)
    if start is None:
        _EXECUTE(process, *arguments)
        return
    process.pid = _forked(lambda: _become(start.request, start.streams))
    process._child_created = True  # type: ignore[attr-defined]
    process._close_pipe_fds(*arguments[_PIPES])  # type: ignore[attr-defined]


def _execv_as_fork(path: str, words: Sequence[str]) -> None:
    """``os.execv`` inside a fork: the same process goes on as another Python program."""
    if (found := _program(list(words))) is None:
        _EXECV(path, words)
    else:
        _become(_request(*found), (0, 1, 2))


class _Start:
    """What a process is started with.

    Attributes:
        request: see :func:`_request`.
        streams: its standard input, output and error.
    """

    def __init__(self, given: Mapping[str, Any], program: tuple[str, str], arguments: list[str]) -> None:
        session = bool(given["start_new_session"])
        self.request = _request(program, arguments, given["cwd"], given["env"], session)
        inherited = (given["p2cread"], 0), (given["c2pwrite"], 1), (given["errwrite"], 2)
        self.streams = [number if passed == -1 else passed for passed, number in inherited]

    @classmethod
    def of(cls, arguments: tuple[Any, ...]) -> "_Start | None":
        """From the arguments of ``Popen._execute_child``; None if a fork cannot stand for the process."""
        given = dict(zip(_GIVEN, arguments))
        if given["shell"] or given["pass_fds"] or isinstance(given["args"], str):
            return None
        found = _program([os.fsdecode(word) for word in given["args"]])
        changed = given["env"] is not None and _at_start(given["env"]) != _at_start(os.environ)
        return None if found is None or changed else cls(given, *found)


def _request(
    program: tuple[str, str],
    arguments: Sequence[str],
    directory: str | os.PathLike[str] | None = None,
    variables: Mapping[Any, Any] | None = None,
    session: bool = False,
) -> dict[str, Any]:
    """All that a fork needs to know, representable in JSON; of this process where nothing is given.

    Args:
        program: kind and name.
    """
    variables = os.environ if variables is None else variables
    return {
        "kind": program[0],
        "program": program[1],
        "arguments": list(arguments),
        "directory": os.path.abspath(directory or os.getcwd()),
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()},
        "session": session,
    }


def _at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(READ_AT_START)}


def _program(words: list[str]) -> tuple[tuple[str, str], list[str]] | None:
    """Kind and name of the Python program that a command line starts, and its arguments; None if none."""
    if Path(words[0]).name == "hexad":
        return ("module", "hexad.cli.main"), words[1:]
    if words[0] != sys.executable:
        return None
    rest = words[2:] if words[1:2] == ["-u"] else words[1:]
    if rest[:1] in (["-m"], ["-c"]) and len(rest) > 1:
        return ({"-m": "module", "-c": "code"}[rest[0]], rest[1]), rest[2:]
    if rest and not rest[0].startswith("-"):
        return ("script", rest[0]), rest[1:]
    return None


class Server:
    """The process that has imported everything, as its user sees it.

    Attributes:
        address: of the socket by which other processes reach it.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hexad-forks-")
        self.address = f"{self._directory.name}/socket"
        ours, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            # With the key by which processes that exchange tensors know each other.
            given = [str(listener.fileno()), str(theirs.fileno()), current_process().authkey.hex()]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", *given],
                pass_fds=[listener.fileno(), theirs.fileno()],
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is for the tests
            )
        self._alive = ours  # the server ends with this process


SHARED = "HEXAD_TESTS_SERVER"
"""A variable with the address of a server that several processes of tests use, and with its key."""


def share() -> Server:
    """Start a server for the processes of tests that this one starts; it ends with what is returned."""
    started = Server()
    os.environ[SHARED] = f"{started.address} {current_process().authkey.hex()}"
    return started


@functools.cache
def address() -> str:
    """The address of the server that processes share, or else of this process's own."""
    if SHARED not in os.environ:
        return _own().address
    where, key = os.environ[SHARED].split()
    current_process().authkey = bytes.fromhex(key)
    return where


@functools.cache
def _own() -> Server:
    return Server()


def call(function: str, *descriptors: int) -> tuple[socket.socket, int]:
    """Call a function, ``module:name``, with duplicates of the descriptors in a fork of the server; returns
    what :func:`fork` does."""
    return fork(address(), _request(("function", function), ()), [0, 1, 2, *descriptors])


def status_of(connection: socket.socket) -> int:
    """Wait for the end of a fork, for as long as its connection's timeout; returns the exit status."""
    return int(_line(connection))


def stand_ins(directory: Path) -> None:
    """Write the programs ``hexad`` and ``python``, which fork from the server of this process."""
    for name, word in (("hexad", "hexad"), ("python", sys.executable)):
        path = directory / name
        call = f"from tests.forks import stand_in\nstand_in({address()!r}, {word!r})\n"
        path.write_text(f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n{call}")
        path.chmod(0o755)


def stand_in(address: str, word: str) -> None:
    """Let a fork do what this process was started for, and end as it does."""
    words = [word, *sys.argv[1:]]
    if (found := _program(words)) is None:
        os.execv(sys.executable, words)
    connection, process = fork(address, _request(*found), (0, 1, 2))
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(process, number))
    status = status_of(connection)
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


def fork(address: str, request: Mapping[str, Any], descriptors: Sequence[int]) -> tuple[socket.socket, int]:
    """Start a fork; returns a connection over which its exit status will come, and its process id.

    Args:
        address: of the server.
        request: see :func:`_request`.
        descriptors: its standard input, output and error, and what else it gets.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    with tempfile.TemporaryFile() as file:  # of any length
        file.write(json.dumps(request).encode())
        file.flush()
        socket.send_fds(connection, [b"1"], [file.fileno(), *descriptors])
    return connection, int(_line(connection))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What :func:`fork` has sent."""
    _, numbers, _, _ = socket.recv_fds(connection, 1, 16)
    with os.fdopen(numbers[0], "rb") as file:
        file.seek(0)
        return json.load(file), numbers[1:]


def _line(connection: socket.socket) -> str:
    """A line that a server has sent."""
    text = b""
    while not text.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            raise RuntimeError("the server of forks has ended")
        text += part
    return text.decode()


def serve(listener: socket.socket, alive: socket.socket) -> None:
    """Fork for every connection, and send how the fork has ended; end with the other side of ``alive``."""
    asked: dict[int, socket.socket] = {}  # process -> who waits for its end
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    with selectors.DefaultSelector() as selector:
        for source in (listener, alive, woken):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if alive in ready:
                return
            if woken in ready:
                os.read(woken, 4096)
                while asked and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    with asked.pop(ended[0]) as connection, suppress(OSError):
                        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
            if listener in ready:
                connection, _ = listener.accept()
                request, descriptors = _receive(connection)
                process = _forked(functools.partial(_become, request, descriptors))
                for number in descriptors:
                    os.close(number)
                asked[process] = connection
                connection.sendall(b"%d\n" % process)


def _forked(become: Callable[[], None]) -> int:
    """Fork; the child handles signals as a new interpreter does, and never returns."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    process = os.fork()
    if process == 0:
        try:
            gc.freeze()
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            become()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Run a program as a new interpreter would, and end this process."""
    if request["session"]:
        os.setsid()
    for number, stream in enumerate([os.dup(number) for number in descriptors[:3]]):
        os.dup2(stream, number)
    _close_all_but(descriptors[3:])
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # by TMPDIR
    if rank := os.environ.get("RANK"):
        with suppress(OSError):  # its variables are not in /proc/self/environ
            Path("/proc/self/comm").write_text(f"rank {rank}")
    sys.__stdin__ = sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.__stdout__ = sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.__stderr__ = sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    # What the parent wants to do at its end is not this process's to do.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)
    status = 1
    try:
        status = _status_of(_PROGRAMS[request["kind"]], request["program"], request["arguments"], descriptors)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _close_all_but(descriptors: Sequence[int]) -> None:
    """Close what is neither a standard stream nor among these.

    The numbers stay in use: sockets among the parent's garbage may be collected here much later, and would
    close what has their numbers by then.
    """
    numbers = [int(name) for name in os.listdir("/dev/fd")]
    empty = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        if number > 2 and number != empty and number not in descriptors:
            os.dup2(empty, number, inheritable=False)


def _status_of(execute: Callable[..., None], program: str, arguments: list[str], given: Sequence[int]) -> int:
    """The exit status of a program, whose uncaught exception is printed."""
    subprocess.Popen._execute_child = _execute_as_fork  # type: ignore[attr-defined]
    os.execv = _execv_as_fork  # type: ignore[assignment]
    try:
        execute(program, arguments, given[3:])
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return (ending.code or 0) & 255
        print(ending.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _module(name: str, arguments: list[str], _: Sequence[int]) -> None:
    sys.path[0] = os.getcwd()
    sys.argv = ["-m", *arguments]
    sys.modules.pop(name, None)  # which the parent has imported
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script(path: str, arguments: list[str], _: Sequence[int]) -> None:
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def _code(text: str, arguments: list[str], _: Sequence[int]) -> None:
    sys.path[0] = ""
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(text, "<string>", "exec"), main.__dict__)


def _function(name: str, _: list[str], descriptors: Sequence[int]) -> None:
    module, _, function = name.partition(":")
    getattr(importlib.import_module(module), function)(*descriptors)


_PROGRAMS = {"module": _module, "script": _script, "code": _code, "function": _function}


def main() -> None:
    """The server: its arguments are two sockets' descriptors and the key of :mod:`multiprocessing`."""
    current_process().authkey = bytes.fromhex(sys.argv[3])
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]))


if __name__ == "__main__":
    from tests import forks

    forks.main()  # not this copy: forks import the module by its name
