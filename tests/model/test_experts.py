"""What a layer of experts keeps between its passes, against its closed form."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hexad.model.auxiliary import Auxiliary
from hexad.model.experts import MixtureOfExperts
from hexad.model.experts_inventory import ExpertsSpec
from hexad.model.inventory import ModelInventory
from hexad.model.positions import Geometry
from hexad.model.recompute import recomputing
from hexad.parallel.context.spans import Spans
from hexad.parallel.inventory import Execution

from ..layers import shard_of
from ..small import config_of

TOKENS, HIDDEN = 192, 64


class Made(TorchDispatchMode):
    """Notes the memory of all tensors that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = weakref.ref(storage)
        return result

    def alive(self) -> dict[int, int]:
        """Bytes by address of what is still there."""
        found = {address: storage() for address, storage in self.storages.items()}
        return {address: storage.nbytes() for address, storage in found.items() if storage is not None}


@pytest.mark.parametrize("recomputed", [(), ("moe_act",)])
@pytest.mark.parametrize(
    "moe",
    [
        {"experts": 8, "top_k": 2, "ffn_hidden": 20},
        {"experts": 64, "top_k": 7, "ffn_hidden": 12, "shared_experts": 2, "score": "sigmoid"},
        {"experts": 128, "top_k": 3, "ffn_hidden": 28, "aux_loss": 0.1, "z_loss": 0.1},
        {"experts": 8, "top_k": 3, "ffn_hidden": 36, "score": "topk_softmax"},
    ],
    ids=str,
)
def test_kept_bytes_are_those_of_the_formula(moe: dict[str, Any], recomputed: tuple[Any, ...]) -> None:
    model = config_of(model={"hidden": HIDDEN, "layers": 1, "vocab": 100, "moe": moe}).model
    spec = ModelInventory(model.model_copy(update={"max_positions": TOKENS})).layer(0).parts[1]
    assert isinstance(spec, ExpertsSpec)
    layer: Any = MixtureOfExperts(spec, shard_of(dtype=torch.float32), 0)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.1)
    layer = recomputing(layer, frozenset(recomputed), layer)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    counts = torch.zeros((1, spec.settings.experts + 3), dtype=torch.float64)
    sums = torch.zeros(len(spec.losses), dtype=torch.float64)
    where = Geometry(
        Spans(TOKENS, 2),
        torch.arange(TOKENS) % (TOKENS // 2),
        auxiliary=Auxiliary(spec.losses, sums, 1.0, counts),
    )
    made = Made()
    with made:
        y = layer(x, where)
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, y, *layer.parameters())}
    kept = sum(size for address, size in made.alive().items() if address not in given)
    assert kept == pytest.approx(spec.kept(Execution(2, TOKENS // 2), frozenset(recomputed)), rel=0.03)
