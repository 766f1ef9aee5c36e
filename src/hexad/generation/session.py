"""Generation from a saved model: prompts as texts or conversations, in the world this process belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from hexad.comm import agreed
from hexad.planning import Resolved
from hexad.planning.saved_model import Prompt, SavedModel, encoded, ending_ids
from hexad.topology.mesh import Mesh

from .generator import load_model
from .texts import Continuation, Wanted, write

log = logging.getLogger("hexad")


def generated(
    mesh: Mesh,
    resolved: Resolved,
    saved: SavedModel,
    prompts: Sequence[Prompt],
    wanted: Wanted,
    warn: Callable[[str], object] = log.warning,
) -> Iterator[Continuation]:
    """Continue prompts in their order; all ranks iterate together and get the same.

    Args:
        mesh, resolved: of :func:`hexad.launch` with ``saved.config``.
        saved: from :func:`~hexad.planning.saved_model.generating_model`.
        prompts: to continue.
        wanted: what to write.
        warn: called on the first rank for positions that the model was not made for.

    Raises:
        HexadError: the model or a prompt cannot be used.
    """
    tokenizer = agreed(saved.tokenizer, mesh.world)
    ids = agreed(lambda: encoded(prompts, saved.config, tokenizer), mesh.world)
    longest = max(map(len, ids), default=0) + wanted.tokens
    if mesh.rank == 0 and longest > saved.positions:
        warn(
            f"prompt and new tokens reach {longest} positions, the model was made for {saved.positions} "
            "(model.max_positions)"
        )
    model = load_model(resolved.config, saved.weights, mesh, resolved.plan.layers)
    ends = agreed(lambda: ending_ids(prompts, saved.config, tokenizer), mesh.world)
    yield from write(model, tokenizer, ids, wanted, mesh.pipeline, ends)
