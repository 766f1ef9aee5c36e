"""One GPU gives the CPU's numbers; skipped without one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hexad import Engine, Layout, Mesh, load_config
from hexad.model import attention_kernels
from hexad.parallel import pointwise
from hexad.parallel.context import kernels
from hexad.parallel.context.attention import Merged
from hexad.parallel.context.spans import Spans
from hexad.parallel.contributions import WeightGradient, widening_products
from hexad.parallel.tensor import fp8
from hexad.topology.cluster import has_fp8

from ..parallel.tiles import TILES
from ..small import microbatch_of, random_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]


def _losses(
    device: str,
    dtype: str,
    family: str,
    compiled: str = "none",
    dropout: float = 0.0,
    window: int | None = None,
    after_first: Callable[[], None] = lambda: None,
    **groups: Any,
) -> list[float]:
    model = {"family": family, "layers": 2, "hidden": 128, "heads": 4, "kv_heads": 4, "vocab": 300}
    config = load_config(
        {
            "run": {"compile": compiled},
            "model": {**model, "dropout": dropout, "attention_dropout": dropout, "sliding_window": window},
            "data": {"sequence": 64},
            "batch": {"micro": 2, "global": 4},
            "precision": {"dtype": dtype},
            "lr_schedule": {"warmup": 1},
            **groups,
        }
    )
    engine = Engine(config, Mesh.create(Layout(world=1), torch.device(device)))
    losses = []
    for step in range(4):
        bounds = (0, 20 + step, 64, 128) if step % 2 else None
        microbatch = microbatch_of(random_tokens(300, 2, 64, seed=step), bounds)
        losses.append(engine.train_step([microbatch, microbatch]).loss)
        if step == 1:  # both kinds of batches have been seen
            after_first()
    return losses


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-4), ("bf16", 2e-2), ("fp16", 1e-2)]
)
def test_losses_equal_the_cpus(family: str, dtype: str, tolerance: float) -> None:
    assert _losses("cuda", dtype, family) == pytest.approx(_losses("cpu", dtype, family), rel=tolerance)


@pytest.fixture
def eight_bits() -> Iterator[None]:
    if not has_fp8(torch.device("cuda", 0)):
        pytest.skip("the GPU has no fp8 units")
    # On a CPU with AMX units oneDNN multiplies 8-bit matrices, without them: 36 s where PyTorch takes 0.2.
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.usefixtures("eight_bits")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("compiled", ["none", "pointwise", "full"])
def test_eight_bit_products(family: str, compiled: str) -> None:
    """The GPU's units against the CPU's emulation, which rounds alike and sums in another order."""
    losses = _losses("cuda", "fp8", family, compiled)
    assert losses == pytest.approx(_losses("cpu", "fp8", family), rel=2e-2)
    if compiled != "full":  # whose blocks would be compiled once more
        assert losses != _losses("cuda", "bf16", family, compiled)


@pytest.mark.usefixtures("eight_bits")
def test_eight_bit_products_of_one_layer() -> None:
    """Products alone are nearer: fast accumulation keeps 13 bits or so of a partial sum."""
    generator = torch.Generator().manual_seed(1)
    x, weight, gradient, bias = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((48, 256), (512, 256), (48, 512), (512,))
    )
    for function, operands in (
        (fp8.product, (x, weight)),
        (fp8.product, (x, weight, bias)),
        (fp8.input_gradient, (gradient, weight)),
    ):
        wanted = function(*operands).float()
        result = function(*(operand.cuda() for operand in operands)).cpu().float()
        assert (result - wanted).norm() < 1e-2 * wanted.norm()
    x[3, 4] = float("inf")
    assert torch.isnan(fp8.product(x.cuda(), weight.cuda())[3]).all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("compiled", ["pointwise", "full"])
def test_compiled(family: str, compiled: str) -> None:
    losses = _losses("cuda", "fp32", family, compiled=compiled)
    assert losses == pytest.approx(_losses("cuda", "fp32", family), rel=1e-4)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_dropout_drops_what_it_drops_on_a_cpu(recompute: str) -> None:
    memory = {"recompute": recompute}
    losses = _losses("cuda", "fp64", "gpt2", dropout=0.2, memory=memory)
    assert losses == pytest.approx(_losses("cpu", "fp64", "gpt2", dropout=0.2), rel=1e-9)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-4)])
def test_the_host_makes_the_update(dtype: str, tolerance: float, zero: int) -> None:
    """Copies to and from pinned memory arrive before they are used: a bucket's gradient of the step before
    changes losses by up to 3e-4. Master values that differ in the last bit may round to another bf16 number,
    which changes them by 4e-5."""
    losses = _losses("cuda", dtype, "llama", memory={"offload": "optimizer"}, parallel={"zero": zero})
    assert losses == pytest.approx(_losses("cuda", dtype, "llama"), rel=tolerance)


@pytest.mark.parametrize("compiled", ["none", "pointwise"])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_documents_and_windows(dtype: str, window: int | None, compiled: str) -> None:
    """In 16 bits by one call of varlen where the GPU has it; every second batch has documents."""
    losses = _losses("cuda", dtype, "mistral", compiled, window=window)
    tolerance = 1e-4 if dtype == "fp32" else 2e-2
    assert losses == pytest.approx(_losses("cpu", dtype, "mistral", window=window), rel=tolerance)


def test_the_varlen_kernel_computes_what_separate_calls_do() -> None:
    gpu = torch.device("cuda", 0)
    kernel = attention_kernels.device_kernel(gpu, torch.bfloat16, 4, 2, 64, 0.125, 24)
    if kernel.varlen is None:
        pytest.skip("this GPU, or this version of PyTorch, has no varlen kernel with windows")
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn((160, heads, 64), generator=generator).to(gpu, torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    )
    spans = Spans(160, 2, (0, 3, 80, 150, 160))
    plain = attention_kernels.AttentionKernel(kernel.scale, kernel.window)
    outputs = [function(q, k, v, spans) for function in (kernel, plain)]
    gradients = [torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in outputs]
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", TILES)
def test_the_kernel_of_context_parallel_computes_what_products_do(name: str) -> None:
    gpu, tile = torch.device("cuda", 0), TILES[name]
    generator = torch.Generator().manual_seed(1)
    rows, columns = tile.rows[1] - tile.rows[0], tile.columns[1] - tile.columns[0]
    q, gradient = (torch.randn((rows, 4, 64), generator=generator).to(gpu, torch.bfloat16) for _ in range(2))
    k, v = (torch.randn((columns, 2, 64), generator=generator).to(gpu, torch.bfloat16) for _ in range(2))
    given, sums = kernels.Operands(q, k, v), []
    for kernel in (kernels.CudaFlash(0.125), kernels.Plain(0.125, None)):
        merged = Merged(q)
        for part in kernel.forward(given, tile):
            merged.add((0, rows), part)
        total = [torch.zeros(tensor.shape, device=gpu) for tensor in given]
        results = kernels.Results(merged.out.to(q.dtype), merged.lse, gradient)
        for gradients in kernel.backward(given, results, tile):
            for whole, part, where in zip(
                total, gradients[2:], (gradients.rows, gradients.columns, gradients.columns)
            ):
                whole[where] += part
        sums.append([merged.out, merged.lse, *total])
    torch.testing.assert_close(sums[0], sums[1], rtol=5e-2, atol=5e-2)


def test_weight_gradients_are_added_in_one_product() -> None:
    gpu = torch.device("cuda", 0)
    assert widening_products(gpu)
    generator = torch.Generator().manual_seed(1)
    gradient, inputs = (torch.randn(64, n, generator=generator).to(gpu, torch.bfloat16) for n in (48, 32))
    total = torch.full((48, 32), 3.0, device=gpu)
    for fresh, before in ((False, 3.0), (True, 0.0)):
        WeightGradient(gradient, inputs).add_to(total, fresh)
        wanted = gradient.float().t() @ inputs.float() + before
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-3)
        total.fill_(3.0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_level_of_zero_on_one_rank(dtype: str, zero: int) -> None:
    losses = _losses("cuda", dtype, "llama", "pointwise", parallel={"zero": zero})
    assert losses == pytest.approx(_losses("cuda", dtype, "llama", "pointwise"), rel=1e-5)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_compiled_functions_with_recompute(recompute: str) -> None:
    losses = _losses("cuda", "bf16", "llama", "pointwise", memory={"recompute": recompute})
    assert losses == pytest.approx(_losses("cuda", "bf16", "llama", "pointwise"), rel=1e-2)


def test_the_host_waits_once_per_step() -> None:
    """PyTorch raises where the host waits for the device; the one read of the step is let through."""
    read = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    def refuse_waits() -> None:
        torch.cuda.set_sync_debug_mode("error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", tolist)
        try:
            _losses("cuda", "bf16", "llama", "pointwise", after_first=refuse_waits)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("wanted", [True, False])
def test_launch_configurations_are_not_chosen_by_time(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``run.deterministic``; without it some are, so that this shows something."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from hexad.launching.launch import deterministic

    timed: list[str] = []
    choose = CachingAutotuner.autotune_to_one_config

    def chosen(self: Any, *arguments: Any, **options: Any) -> Any:
        timed.append(self.fn.__name__)
        return choose(self, *arguments, **options)

    monkeypatch.setattr(CachingAutotuner, "autotune_to_one_config", chosen)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch._dynamo.reset()
    pointwise._compiled.cache_clear()
    with torch._inductor.config.patch(force_disable_caches=True), deterministic(wanted, torch.device("cuda")):
        _losses("cuda", "bf16", "llama", "pointwise", 0.1)
    assert bool(timed) == (not wanted), timed
