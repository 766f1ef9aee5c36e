"""The peers for sharded state: what PyTorch itself offers, on the llama of ``plain_torch.py``, two ranks.

Every peer trains on the same weights and tokens with the same AdamW and returns the same loss. Of gradient
accumulation there are two kinds. A peer that is like for like with ZeRO stages 2 and 3 reduces the gradients
of every microbatch, so that no rank ever keeps whole gradients. The variants named ``_accumulate`` reduce in
the last microbatch only: less communication, but whole gradients stay in memory in between, as in stage 1.

In bf16, DDP and the sharded optimizer run under autocast (fp32 parameters), and FSDP2 with bf16 parameters,
fp32 master weights and fp32 reduction. By hand, which prints every peer's losses::

    cd benchmarks
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m peers.sharded [--dtype bf16]
"""

import argparse
import gc
import importlib.util
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from .plain_torch import ADAMW, MICRO, Llama, Shape, decay_groups, random_tokens, reference_weights

Step = Callable[[], float]


@dataclass(frozen=True)
class Peer:
    """A program to compare with.

    Attributes:
        stage: the ZeRO stage that it corresponds to.
        make: (tokens, dtype) to a step that returns the mean loss before the update.
        like: it holds no more state and gradients than the stage allows.
        needs: a package that is not among the dependencies.
    """

    stage: int
    make: Callable[[Tensor, str], Step]
    like: bool = True
    needs: str = "torch"

    @property
    def installed(self) -> bool:
        """Whether it can run here."""
        return importlib.util.find_spec(self.needs) is not None


def llama() -> Llama:
    """The model with the reference weights."""
    model = Llama(Shape())
    model.load_state_dict(reference_weights(), strict=True)
    return model


def microbatches(tokens: Tensor) -> tuple[Tensor, ...]:
    """This rank's share of [global batch, sequence + 1] token ids."""
    return tokens.chunk(dist.get_world_size())[dist.get_rank()].split(MICRO)


def cross_entropy(model: nn.Module, sample: Tensor) -> Tensor:
    """Mean loss per target token, computed in fp32."""
    logits = model(sample[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits.float(), sample[:, 1:].flatten())


def mean_over_ranks(losses: list[Tensor]) -> float:
    """The loss of the global batch."""
    total = torch.stack(losses).mean()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return float(total)


def accumulating(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    around: Callable[[bool], AbstractContextManager[None]],
    autocast: bool = False,
) -> Step:
    """A step over this rank's microbatches; ``around(last)`` is entered around each."""
    batch = microbatches(tokens)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for index, sample in enumerate(batch):
            with around(index == len(batch) - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = cross_entropy(model, sample)
                (loss / len(batch)).backward()
            losses.append(loss.detach())
        optimizer.step()
        return mean_over_ranks(losses)

    return step


def ddp(tokens: Tensor, dtype: str, shard: bool = False, views: bool = False) -> Step:
    """DDP; with ``shard`` its optimizer state is divided (stage 1)."""
    model = DistributedDataParallel(llama(), gradient_as_bucket_view=True)
    groups = decay_groups(model)
    optimizer: torch.optim.Optimizer
    if shard:
        optimizer = ZeroRedundancyOptimizer(
            groups, torch.optim.AdamW, parameters_as_bucket_view=views, **ADAMW
        )
    else:
        optimizer = torch.optim.AdamW(groups, **ADAMW)

    def around(last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else model.no_sync()

    return accumulating(model, optimizer, tokens, around, autocast=dtype == "bf16")


def fsdp(tokens: Tensor, dtype: str, reshard: bool, every: bool) -> Step:
    """FSDP2, a unit per block and the rest as the root's.

    Args:
        tokens: see :class:`Peer`.
        dtype: ``fp32`` or ``bf16``.
        reshard: give parameters up after forward (stage 3; FSDP2 keeps the root's until its backward).
        every: reduce every microbatch's gradients, not the sum of all.
    """
    model = llama()
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(decay_groups(model), **ADAMW)

    def around(last: bool) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(every or last)
        if not reshard:  # what forward has gathered serves all microbatches
            model.set_reshard_after_backward(last)
        return nullcontext()

    return accumulating(model, optimizer, tokens, around)


def deepspeed(tokens: Tensor, dtype: str, stage: int) -> Step:
    """DeepSpeed's, imported only when it is asked for."""
    from .deepspeed_zero import make_step

    model = llama()
    optimizer = torch.optim.AdamW(decay_groups(model), **ADAMW)
    return make_step(model, optimizer, microbatches(tokens), stage, dtype)


def _deepspeed(stage: int) -> Peer:
    return Peer(stage, partial(deepspeed, stage=stage), needs="deepspeed")


PEERS = {
    "ddp": Peer(0, ddp),
    "zero_optimizer": Peer(1, partial(ddp, shard=True)),
    "zero_optimizer_views": Peer(1, partial(ddp, shard=True, views=True)),
    "deepspeed1": _deepspeed(1),
    "fsdp_keep": Peer(2, partial(fsdp, reshard=False, every=True)),
    "fsdp_keep_accumulate": Peer(2, partial(fsdp, reshard=False, every=False), like=False),
    "deepspeed2": _deepspeed(2),
    "fsdp": Peer(3, partial(fsdp, reshard=True, every=True)),
    "fsdp_accumulate": Peer(3, partial(fsdp, reshard=True, every=False), like=False),
    "deepspeed3": _deepspeed(3),
}
"""All peers by name: ``fsdp`` gives parameters up after forward, ``fsdp_keep`` keeps them for backward."""


def main() -> None:
    """Every peer's losses and seconds per step, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = random_tokens(Shape())[0]
    for name in options.peers:
        if not PEERS[name].installed:
            continue
        step = PEERS[name].make(tokens, options.dtype)
        losses, seconds = [], []
        for _ in range(options.steps):
            began = time.perf_counter()
            losses.append(step())
            seconds.append(round(time.perf_counter() - began, 2))
        if dist.get_rank() == 0:
            print(json.dumps({"peer": name, "losses": losses, "seconds": seconds}), flush=True)
        del step
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
