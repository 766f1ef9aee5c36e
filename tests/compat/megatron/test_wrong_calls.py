"""Wrong calls of Megatron-LM's functions and layers: one line each, with what to pass."""

import inspect
from collections.abc import Callable
from functools import partial
from operator import attrgetter

import pytest
import torch
from torch import nn

from hexad.compat import megatron
from hexad.compat.megatron import parallel_state
from hexad.config import HexadError

from ...pool import Pool


def _message(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except HexadError as error:
        return str(error)
    return ""


def _configs() -> list[str]:
    """The messages about a layer's ``config`` with two tensor ranks."""
    parallel_state.initialize_model_parallel(2)
    four, two = (megatron.ModelParallelConfig(tensor_model_parallel_size=number) for number in (4, 2))
    kinds = (megatron.ColumnParallelLinear, megatron.VocabParallelEmbedding)
    try:
        messages = [
            _message(partial(kind, 8, 8, config=config)) for config in (None, 32, four, two) for kind in kinds
        ]
        alone = parallel_state.get_context_parallel_group()  # of one rank
        messages.append(_message(lambda: megatron.RowParallelLinear(8, 8, config=four, tp_group=alone)))
    finally:
        parallel_state.destroy_model_parallel()
    return messages


def test_config_of_a_layer(pool: Pool) -> None:
    hint = "pass a ModelParallelConfig or get_args()"
    size = "config.tensor_model_parallel_size: found 4, but the mesh has 2 tensor ranks; make them equal"
    for messages in pool.run(2, _configs):
        assert messages == [
            f"ColumnParallelLinear: config: found None; {hint}",
            f"VocabParallelEmbedding: config: found None; {hint}",
            f"ColumnParallelLinear: config: found int; {hint}",
            f"VocabParallelEmbedding: config: found int; {hint}",
            f"ColumnParallelLinear: {size}",
            f"VocabParallelEmbedding: {size}",
            *[""] * 3,
        ]


@pytest.mark.parametrize(
    ("model", "kind"), [(None, "None"), (nn.Linear(1, 1), "a Linear"), ([nn.Linear(1, 1)], "a list")]
)
def test_model_of_another_kind(model: object, kind: str) -> None:
    forward_backward = megatron.get_forward_backward_func()
    with pytest.raises(HexadError, match=f"^model: found {kind}; pass what setup_model returns$"):
        forward_backward(
            forward_step_func=lambda *_: None, data_iterator=iter(()), model=model, num_microbatches=1
        )


FUNCTIONS: dict[str, tuple[str, Callable[..., object]]] = {
    "initialize_model_parallel": ("parallel_state", parallel_state.initialize_model_parallel),
    "GPTModel": ("models.gpt.gpt_model", megatron.GPTModel),
    "GPTModel.forward": ("models.gpt.gpt_model", megatron.GPTModel.forward),
    "ColumnParallelLinear": ("tensor_parallel.layers", megatron.ColumnParallelLinear),
    "RowParallelLinear": ("tensor_parallel.layers", megatron.RowParallelLinear),
    "forward_backward_no_pipelining": ("pipeline_parallel.schedules", megatron.get_forward_backward_func()),
}


def every_argument(name: str) -> dict[str, object]:
    """Megatron-core's arguments, all None."""
    core = pytest.importorskip(f"megatron.core.{FUNCTIONS[name][0]}")
    parameters = inspect.signature(attrgetter(name)(core)).parameters
    return {key: 4 if key.endswith("put_size") else None for key in parameters}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_megatron_core_are_known(name: str) -> None:
    """Each is accepted by name; others are not."""
    given, function = every_argument(name), FUNCTIONS[name][1]
    with pytest.raises((HexadError, AttributeError)):  # there is no mesh, nor a model
        function(**given)
    with pytest.raises(TypeError, match="unexpected argument 'pg_colection'"):
        function(**given, pg_colection=None)


@pytest.mark.parametrize(
    ("name", "argument", "value", "found"),
    [
        ("initialize_model_parallel", "num_distributed_optimizer_instances", 2, "2"),
        ("GPTModel", "seq_len_interpolation_factor", 2.0, "2.0"),
        ("GPTModel.forward", "packed_seq_params", [1], "list"),
        ("GPTModel.forward", "decoder_input", torch.ones(2), "Tensor"),
        ("RowParallelLinear", "stride", 2, "2"),
        ("forward_backward_no_pipelining", "collect_non_loss_data", True, "True"),
    ],
)
def test_arguments_without_an_equivalent(name: str, argument: str, value: object, found: str) -> None:
    """They would change what is computed."""
    with pytest.raises(HexadError, match=f": found {argument} {found}; it is not supported: leave it out"):
        FUNCTIONS[name][1](**{**every_argument(name), argument: value})


def test_unknown_name() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'get_tokeniser' \(did you mean 'get_tokenizer'\?\)"
    ):
        megatron.get_tokeniser  # noqa: B018
