"""Compares the files of a wheel and an sdist with those of the source: ``contents.py SOURCE DIST``."""

import sys
import tarfile
import zipfile
from pathlib import Path

SDIST = ("README.md", "LICENSE", "pyproject.toml", "constraints.txt", "docs/recipes.md", "tests/conftest.py")
"""What an sdist has besides the package, a sample."""


def main(source: Path, dist: Path) -> int:
    """Print what is missing and what is too much; returns the exit status."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    package = {
        str(path.relative_to(source / "src")) for path in (source / "src/hexad").rglob("*") if path.is_file()
    }
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    problems = [f"{wheel.name} lacks {name}" for name in sorted(package - in_wheel)]
    problems += [f"{wheel.name} has {name}, which the source lacks" for name in sorted(in_wheel - package)]
    wanted = {f"src/{name}" for name in package} | set(SDIST)
    problems += [f"{sdist.name} lacks {name}" for name in sorted(wanted - in_sdist)]
    print("\n".join(problems) or f"{wheel.name}: {len(package)} files of the package, all of the source")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
