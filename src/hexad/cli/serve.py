"""``hexad serve``: a run's, checkpoint's or published model behind OpenAI's interface."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from hexad.config import HexadError

from .options import nproc_option, overrides_argument, run_ranks

_KEYS = "HEXAD_API_KEY"


@click.command("serve")
@click.argument("source", metavar="RUN|CHECKPOINT|hf:DIR")
@overrides_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: a free one."
)
@click.option("--name", help="Name of the model in requests. [default: that of its directory]")
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    help="Key that requests need; several with several options. Other users of this machine see command "
    f"lines: {_KEYS} in the environment, with spaces between keys, is safer.",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Name under which clients reach a server without keys, besides its addresses, localhost, and the "
    "machine's own; several with several options.",
)
@click.option("--strict", is_flag=True, help="Refuse fields of requests that are not known.")
@nproc_option("tensor")
def serve(source: str, nproc: int, keys: tuple[str, ...], **options: Any) -> int:
    """Answer requests of OpenAI's interface: /v1/completions, /v1/chat/completions, /v1/models.

    /health is 200 once the model is loaded, /metrics is for Prometheus, / is a page to chat. KEY=VALUE
    overrides the checkpoint's settings, as in parallel.data=2, precision.dtype=bf16 or inference.queue=100.
    SIGTERM or Ctrl-C lets running requests end, inference.grace seconds at most.
    """
    from hexad.launching.environment import environment
    from hexad.planning.saved_model import find_model, generating_model

    missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise HexadError(f"serve: needs {', '.join(missing)}: pip install 'hexad[serve]'")
    nproc = environment().world if environment().joined else nproc
    request = {**options, "checkpoint": find_model(source), "nproc": nproc}
    request["name"] = options["name"] or _name(source)
    # Refuse what is wrong before any rank is started.
    generating_model(request["checkpoint"], request["overrides"], nproc).tokenizer()
    keys = tuple(keys or os.environ.get(_KEYS, "").split())
    if any(not key.isprintable() or not key.isascii() or " " in key or not key for key in keys):
        raise HexadError("--api-key: found one with spaces or other characters than ASCII; choose another")
    os.environ[_KEYS] = " ".join(keys)  # not on command lines of ranks
    return run_ranks("serve", request, nproc)


def _name(source: str) -> str:
    """The last part of a path or of ``hf:ORG/NAME`` that is not a step of a run."""
    path = Path(source.removeprefix("hf:"))
    parts = [part for part in path.resolve().parts if not part.startswith(("step-", "checkpoints"))]
    return parts[-1] if len(parts) > 1 else str(path)


def serve_here(request: dict[str, Any]) -> None:
    """Run one rank of the server."""
    from hexad.generation.server.serve import serve as serve_rank
    from hexad.planning.saved_model import generating_model

    saved = generating_model(request["checkpoint"], request["overrides"], request["nproc"])
    keys = tuple(os.environ.get(_KEYS, "").split())
    where = request["host"], request["port"]
    access = {"keys": keys, "hosts": request["hosts"], "strict": request["strict"]}
    serve_rank(saved, *where, request["name"], access, lambda line: click.echo(line, err=True))
