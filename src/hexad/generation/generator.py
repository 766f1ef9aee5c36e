"""Generation from a run or checkpoint, over any number of tensor, context and pipeline ranks; sampling of the
next token from logits.

Context ranks divide the tokens of the prompts. Each then has the keys and values of all of them, and computes
the same new tokens as the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from hexad.checkpoint.base import load_model_weights
from hexad.checkpoint.tensor_file import Chunk
from hexad.comm import all_gather, broadcast, receive_async, send_async
from hexad.config import Config, ConfigError, HexadError
from hexad.model.transformer import DTYPES, Transformer, build_stages, factored_mesh, make_shard
from hexad.parallel.context.exchange import numbers_of, selected_rows
from hexad.parallel.context.slice import Balance, Slicing
from hexad.parallel.context.spans import Spans
from hexad.parallel.sharding import Declared, declared_parameters
from hexad.topology.mesh import Axis, Mesh

from .cache import KeyValueCache, Lengths


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: choose among the k likeliest; 0 means all.
        top_p: choose among the fewest likeliest whose probabilities reach this sum (Holtzman et al.,
            arXiv 1904.09751).
        seed: of the draws.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, int | float) or not 0 <= self.temperature < inf:
            raise ConfigError("--temperature", f"found {self.temperature!r}, expected a number from 0")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ConfigError("--top-k", f"found {self.top_k!r}, expected 0 (all) or more")
        if not isinstance(self.top_p, int | float) or not 0 < self.top_p <= 1:
            raise ConfigError("--top-p", f"found {self.top_p!r}, expected a number above 0, at most 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError("--seed", f"found {self.seed!r}, expected 0 to 2^63 - 1")


def asked_sampling(temperature: float, top_k: int, top_p: float, seed: int) -> Sampling:
    """The sampling that a user asks for.

    Raises:
        ConfigError: as for :class:`Sampling`, or ``top_k`` or ``top_p`` without a temperature.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    if not temperature and (top_k or top_p < 1):
        name, value = ("--top-k", top_k) if top_k else ("--top-p", top_p)
        raise ConfigError(
            name, f"found {value} with temperature 0, which takes the likeliest token; raise it"
        )
    return sampling


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """int64 ``[sequences]`` next tokens from ``[sequences, vocab]`` logits on the CPU."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.double() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, places = probabilities.sort(dim=-1, descending=True)
        # A token stays if those before it do not reach top_p yet; the likeliest always stays.
        ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= sampling.top_p, 0.0)
        probabilities = torch.zeros_like(ordered).scatter_(-1, places, ordered)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def load_model(config: Config, source: Path | str, mesh: Mesh, layers: Sequence[range]) -> Transformer:
    """This rank's stage of a saved model; each rank reads only its own slices.

    Args:
        config: of the generation; ``model`` is the source's.
        source: a checkpoint's directory, or ``hf:DIR``.
        mesh: tensor, context and pipeline ranks.
        layers: of every stage, one stage per pipeline rank.

    Raises:
        AgreedError: the checkpoint does not fit the configuration or is damaged.
    """
    dtype = DTYPES[config.precision.dtype]
    stored = torch.float64 if dtype == torch.float64 else torch.float32  # the precision of master weights
    mesh = factored_mesh(config.model, config.parallel, mesh)
    shard = replace(make_shard(config.parallel, mesh, stored), sequence=False, chunks=1)
    rank = mesh.pipeline.rank
    model = build_stages(config.model, shard, layers, range(len(layers)), rank)[rank]
    load_model_weights(source, config, _chunks(declared_parameters(model)), mesh.world)
    return model.to(dtype).eval()


def _chunks(parameters: Sequence[Declared]) -> list[Chunk]:
    """This rank's part of the parameters as chunks, set to zero."""
    chunks = []
    for declared in parameters:
        values = declared.parameter.data.zero_()
        for start, rectangle, _ in declared.pieces:
            if rectangle.numel:
                local = values.narrow(0, start, rectangle.sizes[0])
                named = rectangle.named(f"model.{rectangle.name}")
                chunks.append(Chunk(named, local, rounded=declared.declaration.frozen))
    return chunks


def generate_all(
    model: Transformer,
    prompts: Sequence[list[int]],
    tokens: int,
    sampling: Sampling,
    ended: Callable[[int, list[int]], bool],
    seeds: Sequence[int] | None = None,
    pipeline: Axis | None = None,
) -> list[list[int]]:
    """Up to ``tokens`` new token ids after each prompt, all prompts at once.

    Every tensor, context and pipeline rank calls this together, with its own stage as ``model``, and gets the
    same ids. A prompt's ids do not depend on those beside it, but for rounding.

    Args:
        ended: whether a sequence, by the prompt's number and its new ids, is complete; the same on all ranks.
        seeds: of each prompt's draws; by default ``sampling.seed`` for all.
        pipeline: the axis of the stages.

    Raises:
        HexadError: an empty prompt, ids outside the vocabulary, or more positions than the model has.
    """
    new: list[list[int]] = [[] for _ in prompts]
    seeds = [sampling.seed] * len(prompts) if seeds is None else seeds
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    scaling = model.model.rope_scaling
    # Beyond this length LongRoPE has other frequencies, with which all keys are computed again.
    switch = scaling.original_positions if scaling is not None and scaling.type == "longrope" else 0
    numbers = list(range(len(prompts)))
    while numbers:
        begun = [prompts[number] + new[number] for number in numbers]
        left = tokens - min(len(new[number]) for number in numbers)
        of_rows, again = [generators[number] for number in numbers], []
        for tokens_of in _steps(model, begun, left, sampling, of_rows, pipeline):
            for row, token in list(tokens_of.items()):
                number = numbers[row]
                new[number].append(token)
                done = ended(number, new[number]) or len(new[number]) == tokens
                if not done and len(prompts[number]) + len(new[number]) == switch + 1:
                    again.append(number)
                elif not done:
                    continue
                del tokens_of[row]  # it does not continue
        numbers = again
    return new


@torch.no_grad()
def _steps(
    model: Transformer,
    prompts: Sequence[list[int]],
    tokens: int,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    pipeline: Axis | None,
) -> Iterator[dict[int, int]]:
    """The next id of every prompt that continues, by its number: those that the caller leaves in what was
    yielded before."""
    for prompt in prompts:
        _check(model, prompt, tokens)
    device, pipeline = model.shard.device, pipeline or Axis("pipeline")
    lengths = Lengths([*map(len, prompts)], max(map(len, prompts)) + tokens, device)
    caches = [KeyValueCache(lengths) for _ in model.layers]
    running = list(range(len(prompts)))  # prompts of the rows
    spans: Spans | None
    fresh, spans = divided(model, prompts)
    start: Tensor | None = None
    last = torch.tensor(lengths.bounds[1:], device=device) - 1
    for _ in range(tokens):
        inputs = from_stage_before(model, fresh, pipeline)
        hidden = model(fresh, spans, caches, start, inputs)
        fresh = torch.zeros((len(running), 1), dtype=torch.int64, device=device)
        if model.inventory.last:
            numbers = None if spans is None else spans.numbers
            logits = gathered_logits(model, selected_rows(hidden, last, numbers, model.shard.context))
            rows_of = zip(logits.split(1), running)
            fresh[:, 0] = torch.cat([choose(row, sampling, generators[number]) for row, number in rows_of])
        else:
            send_async(hidden, pipeline, pipeline.rank + 1).wait()
        fresh = broadcast(fresh, pipeline, source=pipeline.size - 1)
        fresh = broadcast(fresh, model.shard.context)  # even if context ranks round differently
        if start is not None:
            lengths.advance()
        tokens_of = dict(zip(running, fresh[:, 0].tolist()))
        yield tokens_of
        rows = [row for row, number in enumerate(running) if number in tokens_of]
        if not rows:
            return
        if len(rows) < len(running):
            kept = torch.tensor(rows, device=device)
            running, fresh = [running[row] for row in rows], fresh[kept]
            lengths.keep(kept)
            for cache in caches:
                cache.keep(kept)
        spans, start, last = None, lengths.now, torch.arange(len(running), device=device)


def _check(model: Transformer, prompt: list[int], tokens: int) -> None:
    if not prompt:
        raise HexadError("--prompt: found no tokens, expected at least one")
    if max(prompt) >= model.vocab or min(prompt) < 0:
        raise ConfigError(
            "data.tokenizer", f"gives token id {max(prompt)}, but the model's vocabulary is {model.vocab}"
        )
    if model.positions is not None and len(prompt) + tokens > model.positions.weight.shape[0]:
        raise ConfigError(
            "--tokens",
            f"{len(prompt)} prompt tokens and {tokens} new ones exceed the model's "
            f"{model.positions.weight.shape[0]} positions",
        )


def divided(model: Transformer, sequences: Sequence[list[int]]) -> tuple[Tensor, Spans]:
    """Sequences of any lengths one after the other, and of these the tokens that this context rank holds.

    Each is a document, to which attention and positions are confined. Padding, so that every rank has as many
    tokens, is one more.

    Returns:
        int64 ``[1, this rank's tokens]``, and the spans of all tokens.
    """
    shard = model.shard
    bounds = list(accumulate(map(len, sequences), initial=0))
    ids = list(chain.from_iterable(sequences))
    if shard.context.size == 1:
        return torch.tensor([ids], device=shard.device), Spans(len(ids), 1, bounds)
    missing = -len(ids) % shard.context.size
    if missing:
        ids += [0] * missing
        bounds.append(len(ids))
    # Where all ranks exchange heads, each computes attention of all tokens.
    balance: Balance = "work" if shard.ring.size > 1 else "none"
    slicing = Slicing(shard.context.size, balance, shard.ulysses.size, model.model.sliding_window)
    slice_ = slicing.divided(1, len(ids), tuple(bounds))
    numbers = numbers_of(slice_, shard.context.rank)
    tokens = torch.tensor(ids)[numbers][None].to(shard.device)
    return tokens, Spans(len(ids), 1, bounds, slice_, numbers.to(shard.device))


def from_stage_before(model: Transformer, fresh: Tensor, pipeline: Axis) -> Tensor | None:
    """``[tokens, hidden]`` of the new tokens; None on the first stage."""
    if model.inventory.first:
        return None
    buffer = torch.empty(fresh.numel(), model.hidden, dtype=model.dtype, device=fresh.device)
    return receive_async(buffer, pipeline, pipeline.rank - 1).wait()


def gathered_logits(model: Transformer, hidden: Tensor) -> Tensor:
    """``[sequences, vocab]`` logits on the CPU, gathered from the tensor ranks and without padding."""
    parts = all_gather(model.logits(hidden).contiguous(), model.shard.tensor)
    whole = parts.unflatten(0, (-1, len(hidden))).transpose(0, 1).flatten(1)
    return whole[:, : model.vocab].float().cpu()
