"""Launch lines in the shell scripts of a repository: what they pass to a training program.

Each script is read by bash in a copy of the repository's text files, in namespaces of its own (Linux's
``unshare``: no network, no other processes, no other files), with stand-ins in place of launchers
(``torchrun``, ``srun``, ``deepspeed``, ...) that record their arguments. The script's arguments are those of
an example call in a README beside it.
"""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_SCRIPTS = (".sh", ".slurm", ".sbatch")
_COPIED = (*_SCRIPTS, ".md", ".json", ".yaml", ".yml", ".txt", ".py", ".env", ".conf")
_PLACEHOLDER = re.compile(r"=<[^<>()&|;$'\"\n]+>")
"""``VARIABLE=<Specify path>``, which is not bash."""
_TIME = re.compile(r"\d{4}[.-]\d\d[.-]\d\d[-_.]\d\d[.:]\d\d[.:]\d\d")
"""Of the run, in names of files."""
_LONGEST = 20.0
"""Seconds that a script may take."""
_LARGEST = 1 << 20
"""Bytes of a file that is copied."""
_LAUNCHERS = (
    "torchrun python python3 deepspeed accelerate uv aprun ds srun mpirun mpiexec sbatch nsys numactl msrun"
)
_STAND_IN = r"""#!/bin/bash
for word in "$@"; do
    case "$word" in *.py) { printf '%s\0' "$PWD" "$@"; printf '\n\0'; } >> /launches; exit 0;; esac
done
[ "$1" = -c ] && echo 8 # scripts ask Python for the number of GPUs
while [ $# -gt 0 ]; do
    case "${1##*/}" in bash|sh) exec "$@";; esac
    shift
done
exit 0
"""
_BEGIN = r"""
command_not_found_handle() { /tools/stand-in "$@"; }
for name in clear module sleep conda wget curl git set; do eval "$name() { :; }; export -f $name"; done
source() { [ ! -r "$1" ] || builtin source "$@"; }
export -f command_not_found_handle source
builtin source "$0" "$@"
"""
"""Without ``set``: a script does not end where a file or program is missing."""
_ISOLATED = r"""
cd "$1" && shift
for name in usr bin sbin lib lib64; do
    if [ -L "/$name" ]; then [ -L "$name" ] || cp -d "/$name" "$name"
    elif [ -d "/$name" ]; then
        mkdir -p "$name" && mount --rbind "/$name" "$name" && mount -o remount,bind,ro "$name"
    fi || { echo "unshare: $name cannot be mounted" >&2; exit 1; }
done
mkdir -p dev && touch dev/null && mount --bind /dev/null dev/null || exit 1
exec chroot . /bin/bash -c 'cd "$1" && shift && exec /bin/bash -c "$@"' bash "$@"
"""
"""Starts bash in a root directory of its own, where programs can be read only."""
_CLUSTER = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOBID": "1",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NUM_NODES": "8",
    "SLURM_NNODES": "8",
    "SLURM_NTASKS": "64",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_NODELIST": "node",
    "SLURM_JOB_NAME": "job",
    "WORLD_SIZE": "8",
    "RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "6000",
    "KUBERNETES_CONTAINER_RESOURCE_GPU": "8",
    "GPUS_PER_NODE": "8",
    "USER": "user",
    "LANG": "C.UTF-8",
}
"""Variables that clusters set."""


@dataclass(frozen=True)
class LaunchLine:
    """One launch of a training program.

    Attributes:
        script: its path in the repository.
        directory: where it was launched: the copy's directory, in which the script may have written files.
        program: the name of the training program.
        words: what follows the program.
    """

    script: str
    directory: Path
    program: str
    words: tuple[str, ...]


@contextmanager
def launch_lines(
    source: Path, arguments: Mapping[str, str], program: re.Pattern[str]
) -> Iterator[list[LaunchLine]]:
    """The different launch lines of all scripts below ``source``, while its copy exists.

    Args:
        arguments: script -> its arguments, where no README has an example of a call.
        program: matches the names of training programs.
    """
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        copy = root / "source"
        _copy_texts(source, copy)
        _make_tools(root / "tools")
        (root / "tmp").mkdir()
        lines: dict[tuple[str, str], LaunchLine] = {}
        for path in sorted(p for p in copy.rglob("*") if p.suffix in _SCRIPTS and p.is_file()):
            name = str(path.relative_to(copy))
            if not program.search(path.read_text(encoding="utf-8", errors="replace")):
                continue
            given = shlex.split(arguments[name]) if name in arguments else example_arguments(path, copy)
            for directory, words in _launches(path, given, root, path.parent) or _launches(
                path, given, root, copy
            ):
                at = next((n for n, word in enumerate(words) if word.endswith(".py")), len(words) - 1)
                base = words[at].rsplit("/", 1)[-1]
                if program.search(base) and words[at + 1 :]:
                    line = LaunchLine(name, root / directory.lstrip("/"), base, tuple(words[at + 1 :]))
                    lines.setdefault((base, _TIME.sub("", " ".join(line.words))), line)
        yield list(lines.values())


def _copy_texts(source: Path, copy: Path) -> None:
    for folder, directories, names in os.walk(source):
        directories[:] = [name for name in directories if name != ".git"]
        target = copy / Path(folder).relative_to(source)
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = Path(folder, name)
            if path.suffix in _SCRIPTS and path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                (target / name).write_text(_PLACEHOLDER.sub("=placeholder", text), encoding="utf-8")
            elif path.suffix in _COPIED and path.is_file() and path.stat().st_size <= _LARGEST:
                shutil.copyfile(path, target / name)


def _make_tools(tools: Path) -> None:
    tools.mkdir()
    for name in ("stand-in", *_LAUNCHERS.split()):
        (tools / name).write_text(_STAND_IN)
        (tools / name).chmod(0o755)


def example_arguments(script: Path, root: Path) -> list[str]:
    """The arguments of the first call of a script in a README of its directory or of the one above."""
    call = re.compile(rf"^[^#\n]*\b(?:bash|sh|sbatch) +\S*{re.escape(script.name)}((?:\\\n|[^\n`])*)", re.M)
    for directory in (script.parent, script.parent.parent):
        if not directory.is_relative_to(root):
            break
        for page in sorted(directory.glob("*.md")):
            match = call.search(page.read_text(encoding="utf-8", errors="replace"))
            if match and match[1].strip():
                lines = (line.split(" #")[0] for line in match[1].replace("\\\n", "\n").splitlines())
                words = " ".join(line.strip().removesuffix("\\") for line in lines).split()
                return [word for word in words if word not in ("&", "|")]
    return []


def _launches(script: Path, given: Sequence[str], root: Path, directory: Path) -> list[tuple[str, list[str]]]:
    """(directory, words) of every launch by a script that is started in ``directory``."""
    record = root / "launches"
    record.write_bytes(b"")
    variables = {**_CLUSTER, "PATH": "/tools:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp"}
    command = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child"]
    command += ["bash", "-c", _ISOLATED, "bash", str(root), f"/{directory.relative_to(root)}"]
    command += [_BEGIN, f"/{script.relative_to(root)}", *given]
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=20
        )
        if b"unshare" in done.stderr or b"chroot" in done.stderr:
            raise SystemExit(f"scripts cannot be isolated: {done.stderr.decode(errors='replace').strip()}")
    launches = record.read_bytes().decode(errors="replace").split("\n\0")
    return [(words[0], words[1:]) for words in (text.split("\0")[:-1] for text in launches) if words]
