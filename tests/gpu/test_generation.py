"""Generation on a GPU gives the CPU's tokens and log-probabilities; skipped without one."""

import pytest
import torch

from hexad.generation.requests import Request
from hexad.generation.sampling import Sampling
from hexad.planning.layouts import planned_layout
from hexad.topology.mesh import Mesh

from ..generation.replicas import MODELS, Degrees, Room, settings, stage_of, written
from ..generation.test_exact import MODELS as EXACT_MODELS
from ..generation.test_exact import check_generated, generated
from ..generation.test_parity import alone, in_order, requests_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]
ROOMS = {
    "wide": Room(),
    "preemption": Room(tokens=56, block=3, batch_tokens=16),
    "blocks": Room(tokens=32 * 256, block=256, batch_tokens=16),
}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", ["llama", "mistral", "longrope"])
def test_tokens_are_those_of_plain_forward_passes_on_the_cpu(name: str, room: str) -> None:
    size = (5, 24, 30, 20)
    requests, arrivals = requests_of(*size)
    order, numbered = in_order(arrivals)
    device = torch.device("cuda")
    outcome = written(name, Degrees(), ROOMS[room], [requests[n - 1] for n in order], numbered, device)
    assert outcome is not None
    for place, number in enumerate(order, 1):
        result, expected = outcome[0][place], alone(name, *size)[number - 1]
        assert result.tokens == expected.tokens
        if result.scores is not None:
            values = [logprob.value for logprob in result.scores]
            assert values == pytest.approx(expected.values, rel=1e-9)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_the_training_forward_pass(name: str, dtype: str, room: str) -> None:
    """Of prompts in parts, and of what was generated after them, in one pass over all of it."""
    device, limit = torch.device("cuda"), {"fp32": 2e-4, "bf16": 0.15, "fp16": 0.02}[dtype]
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in (1, 2, 9, 23, 31, 30)]
    requests = [Request(tuple(ids), Sampling(tokens=9, logprobs=0, prompt_logprobs=0)) for ids in prompts]
    arrivals = {0: [1, 2, 3], 2: [4], 5: [5, 6]}
    precision = {"dtype": dtype}
    outcome = written(name, Degrees(), ROOMS[room], requests, arrivals, device, **precision)
    assert outcome is not None
    config = settings(name, Degrees(), Room(), **precision)
    model = stage_of(config, Mesh.create(planned_layout(config, 1), device))
    for prompt, result in zip(prompts, outcome[0].values(), strict=True):
        ids = torch.tensor([prompt + result.tokens], device=device)
        if name == "longrope" and len(prompt) <= 11:
            continue  # the keys of its short beginning are computed again
        with torch.no_grad():
            logits = model.logits(model(ids))[:-1, :50].float()
        expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        values = [logprob.value for logprob in (*(result.scores or ()), *result.logprobs)]
        assert values == pytest.approx(expected, abs=limit)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", EXACT_MODELS)
def test_exact_arithmetic_has_the_bits_of_the_cpu(name: str, dtype: str) -> None:
    """Of the training forward pass there."""
    results = generated(name, Degrees(), ROOMS["preemption"], dtype, torch.device("cuda"))
    assert results is not None
    check_generated(results, name, dtype)
