"""What computes attention: the table of methods, and that every place of the code computes by it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from hexad.generation import latent_memory, paged_attention
from hexad.generation.blocks import SlotRun
from hexad.generation.paged_attention import Arrangement, GpuMemory, HostMemory, Queries
from hexad.model import attention, attention_kernels
from hexad.model.attention_kernels import AttentionKernel
from hexad.parallel.attention_choice import TILED, AttentionFacts, AttentionMethod, choose_attention
from hexad.parallel.context.kernels import CpuFlash, CudaFlash, Plain, tile_kernel
from hexad.parallel.context.spans import Spans
from hexad.parallel.sharding import declared_parameters, initialise

from ..layers import shard_of, whole_model
from ..small import config_of, random_tokens

EXACT, VARLEN, SDPA, CPU_FLASH, GPU_FLASH, SCORES, ABSORBED = AttentionMethod
CPU = AttentionFacts(cpu=True, byte=4, width=64, varlen=False)
GPU = AttentionFacts(cpu=False, byte=2, width=64, varlen=True)
GPU32 = AttentionFacts(cpu=False, byte=4, width=64, varlen=False)

TABLE: list[tuple[AttentionFacts, dict[str, Any], AttentionMethod]] = [
    # One rank
    (CPU, {}, SDPA),
    (CPU, {"documents": True}, SDPA),
    (CPU, {"windowed": True}, SDPA),
    (GPU, {}, SDPA),
    (GPU, {"documents": True}, VARLEN),
    (GPU, {"windowed": True}, VARLEN),
    (GPU, {"documents": True, "varlen": False}, SDPA),
    (GPU32, {"documents": True, "windowed": True}, SDPA),
    # Context ranks, and dropped probabilities
    (CPU, {"ring": 2}, CPU_FLASH),
    (CPU, {"ring": 2, "documents": True, "windowed": True}, CPU_FLASH),
    (CPU, {"dropped": True}, SCORES),
    (CPU, {"ring": 2, "dropped": True}, SCORES),
    (GPU, {"ring": 2}, GPU_FLASH),
    (GPU, {"ring": 2, "documents": True}, GPU_FLASH),
    (GPU, {"ring": 2, "width": 256}, GPU_FLASH),
    (GPU, {"ring": 2, "width": 68}, SCORES),
    (GPU, {"ring": 2, "width": 264}, SCORES),
    (GPU, {"ring": 2, "varlen": False}, SCORES),
    (GPU, {"ring": 2, "byte": 4}, SCORES),
    (GPU32, {"ring": 2}, SCORES),
    (GPU, {"dropped": True, "documents": True}, SCORES),
    # Exact arithmetic
    (CPU, {"exact": True}, EXACT),
    (GPU, {"exact": True, "documents": True, "windowed": True}, EXACT),
    (CPU, {"exact": True, "ring": 4}, EXACT),
    (CPU, {"exact": True, "cache": "keys"}, EXACT),
    (GPU, {"exact": True, "cache": "latents", "single": True}, EXACT),
    (CPU, {"exact": True, "dropped": True}, SCORES),
    # Caches
    (CPU, {"cache": "keys"}, CPU_FLASH),
    (CPU, {"cache": "keys", "single": True, "windowed": True}, CPU_FLASH),
    (CPU, {"cache": "keys", "windowed": True}, SDPA),
    (GPU, {"cache": "keys"}, VARLEN),
    (GPU, {"cache": "keys", "single": True}, VARLEN),
    (GPU32, {"cache": "keys", "single": True}, SDPA),
    (CPU, {"cache": "latents"}, SDPA),
    (GPU, {"cache": "latents"}, SDPA),
    (CPU, {"cache": "latents", "single": True}, ABSORBED),
    (GPU, {"cache": "latents", "single": True}, ABSORBED),
]


@pytest.mark.parametrize(("facts", "changes", "method"), TABLE)
def test_table(facts: AttentionFacts, changes: dict[str, Any], method: AttentionMethod) -> None:
    assert choose_attention(facts._replace(**changes)) is method


def test_every_method_can_compute_what_it_is_chosen_for() -> None:
    """Over all combinations of facts."""
    devices = [(True, 4, False), (True, 2, False), (False, 2, True), (False, 2, False), (False, 4, False)]
    flags = product((False, True), repeat=5)
    for (cpu, byte, varlen), width, ring, cache, (exact, dropped, documents, windowed, single) in product(
        devices, (64, 68, 512), (1, 2), (None, "keys", "latents"), list(flags)
    ):
        if cache is not None and (ring > 1 or dropped or documents):
            continue  # generation has none of these
        facts = AttentionFacts(
            cpu, byte, width, varlen, exact, ring, dropped, documents, windowed, cache, single
        )
        method = choose_attention(facts)
        assert (method is EXACT) == (exact and not dropped)
        if method is EXACT:
            assert choose_attention(facts._replace(exact=False)) is not EXACT  # of the backward pass
            continue
        assert varlen or method not in (VARLEN, GPU_FLASH)
        assert cpu or method is not CPU_FLASH
        assert method is not ABSORBED or (cache == "latents" and single)
        assert method is not GPU_FLASH or (byte == 2 and width % 8 == 0 and width <= 256)
        if cache is None:
            # Outputs over the keys of several ranks can be merged; only tiles can drop probabilities.
            assert (method in TILED) == (ring > 1 or dropped)
            assert (method is SCORES) or not dropped


def test_tiles_are_computed_by_the_method() -> None:
    factors: Any = object()
    assert {method: type(tile_kernel(method, 1.0, None)) for method in TILED} == {
        CPU_FLASH: CpuFlash,
        GPU_FLASH: CudaFlash,
        SCORES: Plain,
    }
    kernel = tile_kernel(SCORES, 1.0, factors)
    assert isinstance(kernel, Plain) and kernel.factors is factors


# The code computes by what is chosen


@contextmanager
def _chosen(place: Any, method: AttentionMethod, *targets: tuple[Any, str]) -> Iterator[dict[str, int]]:
    """Let ``place`` be told ``method``; yields how often each target is called."""
    calls = {name: 0 for _, name in targets}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(place, "choose_attention", lambda facts: method))
        for owner, name in targets:
            original = getattr(owner, name)

            def counted(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
                calls[name] += 1
                return original(*args, **options)

            stack.enter_context(mock.patch.object(owner, name, counted))
        yield calls


@pytest.mark.parametrize("method", [SDPA, CPU_FLASH, SCORES])
def test_layers_compute_by_the_method(method: AttentionMethod) -> None:
    settings = config_of().model
    model = whole_model(settings, shard_of(dtype=torch.float32))
    initialise(declared_parameters(model), seed=1)
    tokens = random_tokens(int(settings.vocab), 2, 8, seed=2)[:, :-1]
    spans = Spans(tokens.numel(), 2)
    kernels = (CpuFlash, "forward"), (Plain, "_output"), (AttentionKernel, "attend")
    names = {SDPA: "attend", CPU_FLASH: "forward", SCORES: "_output"}
    usual = model(tokens, spans)
    with _chosen(attention, method, *kernels) as calls:
        torch.testing.assert_close(model(tokens, spans), usual)
    assert {name for name, count in calls.items() if count} == {names[method]}


def test_layers_ask_for_their_facts() -> None:
    """A layer's own attributes, and those of a microbatch."""
    asked: list[AttentionFacts] = []

    def record(facts: AttentionFacts) -> AttentionMethod:
        asked.append(facts)
        return choose_attention(facts)

    settings = config_of(model={"sliding_window": 3}).model
    for exact in (False, True):
        model = whole_model(settings, replace(shard_of(dtype=torch.float32), exact=exact))
        initialise(declared_parameters(model), seed=1)
        tokens = random_tokens(int(settings.vocab), 1, 8, seed=2)[:, :-1]
        with mock.patch.object(attention, "choose_attention", record):
            for bounds in (None, (0, 3, 8), (0, 2, 8)):
                model(tokens, Spans(8, 1, bounds))
    width = settings.hidden // settings.heads
    expected = AttentionFacts(True, 4, width, False, windowed=True)
    layers = settings.layers
    for place, facts in enumerate(asked[: 3 * layers]):
        assert facts == expected._replace(documents=place >= layers)
    assert {facts.exact for facts in asked[3 * layers :]} == {True, False}  # forward, and backward


def _step(tokens: int) -> tuple[Arrangement, tuple[torch.Tensor, ...]]:
    """The first tokens of a sequence in a cache."""
    queries = [Queries((0, tokens), 0, 0, (SlotRun(0, tokens),), 0)]
    generator = torch.Generator().manual_seed(3)
    operands = tuple(torch.randn(tokens, heads, 8, generator=generator) for heads in (4, 2, 2))
    return Arrangement(torch.arange(tokens), queries, tokens), operands


@pytest.mark.parametrize("method", [SDPA, CPU_FLASH])
def test_a_cache_on_a_cpu_computes_by_the_method(method: AttentionMethod) -> None:
    step, operands = _step(5)
    memory = HostMemory(8, (2, 8), torch.float32, torch.device("cpu"))
    kernel = AttentionKernel(0.3)
    usual = memory.attend(*operands, step, kernel)
    with _chosen(paged_attention, method, (HostMemory, "_masked"), (paged_attention, "_flash")) as calls:
        torch.testing.assert_close(memory.attend(*operands, step, kernel), usual)
    assert calls == {"_masked": int(method is SDPA), "_flash": int(method is CPU_FLASH)}


@pytest.mark.parametrize("method", [SDPA, VARLEN])
def test_a_cache_on_a_gpu_computes_by_the_method(method: AttentionMethod) -> None:
    step, operands = _step(5)
    memory = GpuMemory(8, (2, 8), torch.float32, torch.device("cpu"), 4)
    calls: list[torch.Tensor] = []

    def varlen(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        calls.append(q)
        return q

    with _chosen(paged_attention, method, (GpuMemory, "_masked")) as masked:
        memory.attend(*operands, step, AttentionKernel(0.3, varlen=varlen))
    assert (len(calls), masked["_masked"]) == ((1, 0) if method is VARLEN else (0, 1))


@pytest.mark.parametrize("method", [SDPA, ABSORBED, EXACT])
def test_a_cache_of_latent_vectors_computes_by_the_method(method: AttentionMethod) -> None:
    step, _ = _step(1)
    memory = latent_memory.LatentMemory(8, 4, torch.float32, torch.device("cpu"))
    computed: list[str] = []
    names = {SDPA: "_expanded", ABSORBED: "_absorbed", EXACT: "_exactly"}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(latent_memory, "choose_attention", lambda facts: method))
        for name in names.values():
            record = lambda *_, name=name: computed.append(name) or torch.zeros(1, 4)  # noqa: E731
            stack.enter_context(mock.patch.object(memory, name, record))
        memory.attend(torch.zeros(1, 4, 8), torch.zeros(1, 4), step, mock.Mock(), AttentionKernel(0.3))
    assert computed == [names[method]]


@pytest.mark.parametrize("method", [SDPA, VARLEN])
def test_a_rank_by_itself_computes_by_the_method(method: AttentionMethod) -> None:
    """Also where varlen would not be needed, or would be."""
    calls: list[int] = []

    def varlen(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        calls.append(len(q))
        return q

    _, operands = _step(8)
    with _chosen(attention_kernels, method):
        for bounds in (None, (0, 3, 8)):
            AttentionKernel(0.3, varlen=varlen)(*operands, Spans(8, 1, bounds))
    assert calls == ([8, 8] if method is VARLEN else [])
