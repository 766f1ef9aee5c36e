"""One step in a process of its own: ``python -m gpu NAME FILE SECONDS PARENT [pretend]``."""

import sys
from importlib import import_module
from pathlib import Path

from .record import Record


def main() -> None:
    """Run the step; its figures are in the file at any time."""
    name, file, seconds, parent, *rest = sys.argv[1:]
    record = Record(Path(file), float(seconds), rest == ["pretend"])
    with record.attempt(name):
        from hexad.launching.environment import end_with

        end_with(int(parent))
        import_module(f".{name}", __package__).run(record)
    raise SystemExit(record.end() != "finished")


if __name__ == "__main__":
    main()
