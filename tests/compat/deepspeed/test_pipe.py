"""Users' lists of layers through the executor: schedules, divisions, ZeRO, ties, tuples."""

from collections import OrderedDict
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hexad.compat import deepspeed
from hexad.compat.deepspeed.data import cast_tensors
from hexad.compat.deepspeed.pipe import balanced
from hexad.config import HexadError
from hexad.engine.forms import Form

from ...pool import Pool, RankError
from .layers import WIDTH, Embedding, batch_of, first, logits, loss_of, specs

MICROBATCHES = 4
"""Of a step, over all data ranks."""


class Whole(nn.Module):
    """The same layers in one module."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        made = [spec.build() for spec in specs(deepspeed, blocks)[: blocks + 1]]
        self.embedding, self.blocks = made[0], nn.ModuleList(made[1:])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return logits(self.embedding, self.norm(first(x)))


def alone(steps: int, blocks: int, lengths: tuple[int, ...] = (9,)) -> list[float]:
    """Losses of plain PyTorch."""
    module = Whole(blocks)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(MICROBATCHES):
            number = step * MICROBATCHES + micro
            tokens, labels = batch_of(number, lengths[number % len(lengths)])
            loss = loss_of(module(tokens), labels) / MICROBATCHES
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), 0.7)
        optimizer.step()
        losses.append(total)
    return losses


def deepspeed_engine(stages: int, zero: int = 0, blocks: int = 4, **more: Any) -> Any:
    torch.manual_seed(3)
    module = deepspeed.PipelineModule(specs(deepspeed, blocks), stages, loss_fn=loss_of, **more)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES // module.mesh.data.size,
        "gradient_clipping": 0.7,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": zero},
    }
    return deepspeed.initialize(model=module, config=config)[0]


def data(engine: Any, begin: int, end: int, lengths: tuple[int, ...] = (9,)) -> Iterator[Any] | None:
    """This data rank's microbatches, where they are read."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    rank, ranks = engine._engine.mesh.data.rank, engine._engine.mesh.data.size
    numbers = range(begin * MICROBATCHES, end * MICROBATCHES)
    mine = [number for number in numbers if number % ranks == rank]
    return iter([batch_of(number, lengths[number % len(lengths)]) for number in mine])


def train(stages: int, zero: int, more: dict[str, Any], steps: int, lengths: tuple[int, ...]) -> list[float]:
    engine = deepspeed_engine(stages, zero, **more)
    batches = data(engine, 0, steps, lengths)
    losses = [float(engine.train_batch(batches)) for _ in range(steps)]
    engine._engine.check_replicas()
    return losses


CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "1 stage": (1, 1, 0, {}),
    "2 stages": (2, 2, 0, {}),
    "3 stages, uniform": (3, 3, 0, {"partition_method": "uniform"}),
    "2 stages, by type, ZeRO 1": (4, 2, 1, {"partition_method": "type:block"}),
    "2 stages, ZeRO 2": (4, 2, 2, {}),
    "2 stages, ZeRO 3": (4, 2, 3, {}),
    "gpipe": (2, 2, 0, {"schedule": "gpipe"}),
    "interleaved": (2, 2, 0, {"schedule": "interleaved", "virtual_stages": 2}),
    "interleaved, ZeRO 3": (4, 2, 3, {"schedule": "interleaved", "virtual_stages": 2}),
    "zb_h1": (2, 2, 0, {"schedule": "zb_h1"}),
    "zb_v, tied on one rank": (2, 2, 1, {"schedule": "zb_v"}),
    "recomputed": (2, 2, 0, {"activation_checkpoint_interval": 2}),
}


QUICK = ("1 stage", "2 stages, ZeRO 3", "interleaved", "zb_v, tied on one rank", "recomputed")
"""The others are in the slow sweep."""


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_losses_are_those_of_one_process(pool: Pool, name: str) -> None:
    world, stages, zero, more = CASES[name]
    expected = alone(3, 4)
    for losses in pool.run(world, train, stages, zero, more, 3, (9,)):
        torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0)


def test_shapes_may_change(pool: Pool) -> None:
    lengths = (9, 5, 9, 12, 7)
    for losses in pool.run(4, train, 2, 3, {}, 3, lengths):
        torch.testing.assert_close(losses, alone(3, 4, lengths), rtol=2e-6, atol=0)


def without_parameters() -> float:
    """A stage of functions, and one of parameters."""
    torch.manual_seed(3)
    module = deepspeed.PipelineModule(
        [nn.Linear(3, 1), nn.Tanh(), nn.Flatten(0)],
        num_stages=2,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=module, config=config)
    batches = iter([(torch.ones(2, 3), torch.full((2,), 0.3))] * 2)
    engine.train_batch(batches)
    with pytest.raises(HexadError, match="each with a part of the model"):
        engine.save_16bit_model("nowhere")
    return float(engine.train_batch(batches))


def test_a_stage_may_have_no_parameters(pool: Pool) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Flatten(0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = torch.ones(2, 3), torch.full((2,), 0.3)
    for _ in range(2):
        loss = nn.functional.mse_loss(module(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    assert pool.run(2, without_parameters) == [pytest.approx(loss.item(), rel=1e-5)] * 2


def saved(stages: int, zero: int, more: dict[str, Any], directory: str) -> list[float]:
    engine = deepspeed_engine(stages, zero, **more)
    batches = data(engine, 0, 4)
    for _ in range(2):
        engine.train_batch(batches)
    engine.save_checkpoint(directory)
    return [float(engine.train_batch(batches)) for _ in range(2)]


def resumed(stages: int, zero: int, more: dict[str, Any], directory: str) -> tuple[list[float], float]:
    engine = deepspeed_engine(stages, zero, **more)
    engine.load_checkpoint(directory)
    held_out = float(engine.eval_batch(data(engine, 9, 10)))
    batches = data(engine, 2, 4)
    return [float(engine.train_batch(batches)) for _ in range(2)], held_out


def test_checkpoints_have_no_stages(pool: Pool, tmp_path: Path) -> None:
    directory = str(tmp_path)
    after = pool.run(4, saved, 2, 3, {}, directory)[0]
    other = pool.run(3, resumed, 3, 0, {"partition_method": "uniform"}, directory)[0]
    alone_again = pool.run(1, resumed, 1, 0, {}, directory)[0]
    torch.testing.assert_close(other[0], after, rtol=2e-6, atol=0)
    torch.testing.assert_close(alone_again, other, rtol=2e-6, atol=0)


def test_stages_are_as_light_as_they_can_be() -> None:
    assert balanced([5, 1, 1, 1, 5], 3) == (range(1), range(1, 4), range(4, 5))
    assert [len(part) for part in balanced([1] * 7, 3)] in ([3, 2, 2], [2, 3, 2], [2, 2, 3])
    assert all(len(part) for part in balanced([0, 0, 0, 9], 4))


@pytest.mark.parametrize("trained", [True, False])
def test_messages_carry_any_tensors(trained: bool) -> None:
    mask, scores = torch.tensor([[True, False, True]]), torch.randn(2, 3, dtype=torch.bfloat16)
    result = torch.randn(5), mask, scores, torch.arange(3), torch.tensor(2.5, dtype=torch.float64)
    form = Form.of(result, trained)
    message = form.message(result)
    assert message.shape == form.empty(torch.device("cpu")).shape
    assert message.dtype == (torch.float64 if trained else torch.float32)
    for one, other in zip(form.result(message), result):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


class Named(OrderedDict[str, torch.Tensor]):
    """A container whose constructor takes something else."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        super().__init__(one=one, other=other)


def test_containers_with_other_constructors_are_cast() -> None:
    cast = cast_tensors([Named(torch.zeros(2), torch.arange(2))], torch.float64)[0]
    assert isinstance(cast, OrderedDict) and list(cast) == ["one", "other"]
    assert [tensor.dtype for tensor in cast.values()] == [torch.float64, torch.int64]


def test_a_message_of_two_formats_of_16_bits_holds_both_exactly() -> None:
    result = torch.tensor([1 + 2**-10], dtype=torch.float16), torch.tensor([2.0**100], dtype=torch.bfloat16)
    form = Form.of(result, True)
    for one, other in zip(form.result(form.message(result)), result):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def mistake(kind: str) -> None:
    if kind == "world":
        deepspeed.PipelineModule([nn.Linear(2, 2)] * 3, num_stages=3)
    if kind == "layers":
        deepspeed.PipelineModule([nn.Linear(2, 2)], num_stages=2)
    if kind == "method":
        deepspeed.PipelineModule(specs(deepspeed), 2, partition_method="paramters")
    if kind == "type":
        deepspeed.PipelineModule(specs(deepspeed), 2, partition_method="type:attention")
    engine = deepspeed_engine(2)
    if kind == "forward":
        engine(torch.zeros(1))
    if kind == "step":
        engine.step()
    if kind == "data":
        engine.train_batch(iter([torch.zeros(2)] * 4))
    if kind == "end":
        engine.train_batch(data(engine, 0, 1) if engine.is_first_stage() else iter([batch_of(0)]))
    if kind == "one rank":
        engine.train_batch(iter([torch.zeros(2)] * 4) if engine.is_last_stage() else data(engine, 0, 1))
    if kind == "buffer":
        tied = deepspeed.TiedLayerSpec("norm", nn.BatchNorm1d, 4)
        deepspeed.PipelineModule([tied, nn.Linear(4, 4), tied], 2)
    if kind == "no data":
        engine.train_batch()
    if kind == "list":
        engine.train_batch([batch_of(0)] * 4)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("world", "num_stages: found 3 in a world of 2 ranks; use one of 1, 2"),
        ("layers", "found 1 layers for 2 stages; use fewer stages"),
        ("method", r"found 'paramters' \(did you mean 'parameters'\?\)"),
        ("type", "found no layer that matches 'attention'; there are Block, Embedding"),
        ("forward", "a pipeline makes complete steps"),
        ("step", "a pipeline makes complete steps"),
        ("data", r"found a Tensor as a microbatch, expected \(inputs, labels\)"),
        ("end", "found 1 microbatches left in the data, expected 4"),
        ("one rank", "found a Tensor as a microbatch"),
        ("buffer", "TiedLayerSpec 'norm': found running_mean, which is not trained"),
        ("no data", "train_batch: found no data_iter and no training_data"),
        ("list", r"train_batch: found a list, expected an iterator: iter\(...\), made once"),
    ],
)
def test_mistakes_are_named(pool: Pool, kind: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(2, mistake, kind)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (nn.Linear(2, 2), "layers: found a Linear, expected a list of layers"),
        ([nn.ReLU(), 3], r"layers\[1\]: found 3, expected a LayerSpec or a function"),
    ],
)
def test_layers_that_are_none_are_named(layers: Any, message: str) -> None:
    with pytest.raises(HexadError, match=message):
        deepspeed.PipelineModule(layers, num_stages=1)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    model = deepspeed.PipelineModule([nn.Linear(2, 2)], num_stages=1)
    engine, *_ = deepspeed.initialize(
        model=model, config={"train_batch_size": 3, "optimizer": {"type": "AdamW"}}
    )
    pair = torch.zeros(3, 2), torch.zeros(3, 2)
    with pytest.raises(HexadError, match=r"without loss_fn, has shape \(3, 2\), expected a scalar loss"):
        engine.train_batch(iter([pair]))


def test_a_loss_may_have_one_element() -> None:
    """Without ``loss_fn``, as in DeepSpeed's own tests."""
    layer = nn.Linear(2, 1)
    model = deepspeed.PipelineModule([deepcopy(layer)], num_stages=1)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    pair = torch.ones(1, 2), torch.zeros(1, 1)
    expected = layer(pair[0]).item()
    assert engine.eval_batch(iter([pair])).item() == expected == engine.train_batch(iter([pair])).item()
    assert engine.eval_batch(iter([pair])).item() < expected


def test_a_tied_layer_is_made_once() -> None:
    module = deepspeed.PipelineModule(specs(deepspeed), num_stages=1)
    tables = [layer for layer in module.modules() if isinstance(layer, Embedding)]
    assert len(tables) == 1
    with pytest.raises(HexadError, match=r"expected a class of torch\.nn\.Module"):
        deepspeed.LayerSpec(first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation_checkpoint_interval": -1}, "activation_checkpoint_interval: found -1"),
        ({"num_stages": "x"}, "num_stages: found 'x'"),
        ({"schedule": "auto"}, "schedule: found auto"),
        ({"partition_method": "type:["}, r"partition_method: found '\[', no regular expression"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HexadError, match=message):
        deepspeed.PipelineModule(specs(deepspeed), **{"num_stages": 1, **arguments})
