"""The kernel of experts' weight gradients without a GPU, in a process that has Triton: run by Triton's
interpreter (``python -m tests.parallel.weight_gradients run``), and compiled ahead (``compile``)."""

import json
import sys
from typing import Any

import torch

ROWS = (5, 0, 130, 17)
OUTS, INS = 150, 70


def run() -> list[float]:
    """The largest errors, for formats and for what a total held before."""
    from triton.runtime import interpreter

    from hexad.parallel.expert.weight_gradient_kernel import add_weight_gradients

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:  # NumPy 2.4 converts arrays without dims only
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    generator, errors = torch.Generator().manual_seed(3), []
    ends = torch.tensor(ROWS).cumsum(0)
    runs = list(zip([0, *ends.tolist()], ends.tolist()))
    for dtype in (torch.float32, torch.float16):  # the interpreter multiplies no bfloat16
        gradient = torch.randn(sum(ROWS) + 9, OUTS, generator=generator).to(dtype)
        inputs = torch.randn(sum(ROWS) + 9, INS, generator=generator).to(dtype)
        for fresh in (True, False):
            total = torch.randn(len(ROWS), OUTS, INS, generator=generator)
            products = torch.stack([gradient[a:b].float().t() @ inputs[a:b].float() for a, b in runs])
            expected = products if fresh else total + products
            add_weight_gradients(total, gradient, inputs, ends.int(), fresh)
            errors.append((total - expected).abs().max().item())
    return errors


def compile_ahead() -> list[int]:
    """Bytes of the machine code for compute capabilities 8.0 and 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hexad.parallel.expert import weight_gradient_kernel as kernel

    names = ("gradient", "inputs", "offsets", "total", "outs", "ins")
    kinds = dict(zip(names, ("*bf16", "*bf16", "*i32", "*fp32", "i32", "i32")))
    constants = ("fresh", "tile", "rows")
    signature = {**kinds, **dict.fromkeys(constants, "constexpr")}
    values = {(len(names),): False, (len(names) + 1,): kernel.TILE, (len(names) + 2,): kernel.ROWS}
    source = ASTSource(fn=kernel.weight_gradients, signature=signature, constexprs=values)
    targets = [GPUTarget("cuda", capability, 32) for capability in (80, 90)]
    compiled = [triton.compile(source, target=target, options={"num_warps": 8}) for target in targets]
    return [len(kernel.asm["cubin"]) for kernel in compiled]


if __name__ == "__main__":
    print(json.dumps(run() if sys.argv[1] == "run" else compile_ahead()))
