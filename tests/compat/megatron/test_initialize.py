"""``initialize_megatron``: arguments, world, groups, seeds and tokenizer of a script."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hexad
from hexad.compat import megatron
from hexad.compat.megatron import parallel_state
from hexad.config import ConfigError, HexadError
from hexad.dataset.load.loader import loader_from_config
from hexad.dataset.text.tokenizer import load_tokenizer

from ...forks import PATIENCE
from ...pool import Pool
from ...training.command import free_port
from .test_translate import SMALL, without

NO_DATA = without(SMALL, "--mock-data", "--tokenizer-type", "--vocab-size")


@contextmanager
def script(*words: str, world: bool = True, **options: Any) -> Iterator[argparse.Namespace]:
    """A script's command line between start and end; with ``world`` its world ends too."""
    with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words]):
        try:
            megatron.initialize_megatron(**options)
            yield megatron.get_args()
        finally:
            megatron.destroy_megatron()
            if world and dist.is_initialized():
                dist.destroy_process_group()


def _alone(save: str) -> None:
    def extra(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument_group("own").add_argument("--my-flag", type=float, default=0.5)
        return parser

    line = [*SMALL, "--my-flag", "2", "--bf16", "--distributed-backend", "gloo", "--seed", "7"]
    defaults = {"tokenizer_type": "X", "save": save}
    with script(*line, extra_args_provider=extra, args_defaults=defaults) as args:
        assert (args.my_flag, args.tokenizer_type, args.save) == (2.0, "NullTokenizer", save)
        assert (args.ffn_hidden_size, args.kv_channels, args.num_query_groups) == (256, 16, 4)
        assert (args.rank, args.world_size, args.data_parallel_size, args.params_dtype) == (
            0,
            1,
            1,
            torch.bfloat16,
        )
        assert (args.padded_vocab_size, args.iteration) == (384, 0)
        drawn = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(drawn, torch.rand(3))
        tokenizer = megatron.get_tokenizer()
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (301, 300, None)
        assert tokenizer.detokenize(tokenizer.tokenize("5 17 299")) == "5 17 299"
        total = torch.ones(1)
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        assert parallel_state.get_model_parallel_world_size() == total.item() == 1
        assert megatron.get_mesh().device.type == "cpu"
        config = megatron.get_config()
        assert (config.model.hidden, config.run.dir, config.data.sequence) == (64, save, 32)
        with pytest.raises(HexadError, match="called before"):
            megatron.initialize_megatron()
    with pytest.raises(HexadError, match="there is no mesh"):
        parallel_state.get_tensor_model_parallel_group()
    with script(*NO_DATA, "--what", "3", "--squared-relu", ignore=["what", "squared-relu"]) as args:
        assert not args.squared_relu
    with script(*NO_DATA, "--what", ignore_unknown_args=True, skip_mpu_initialization=True) as args:
        assert not parallel_state.is_initialized() and not dist.is_initialized()
        with pytest.raises(HexadError, match="--tokenizer-type"):
            megatron.get_tokenizer()
    with pytest.raises(ConfigError, match="--what: not a flag"), script(*NO_DATA, "--what"):
        pass
    with (
        pytest.raises(ConfigError, match=r"norm_eps: .* \(--norm-epsilon\)"),
        script(*NO_DATA, "--norm-epsilon", "-1"),
    ):
        pass


def test_world_of_one(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _alone, str(tmp_path / "run"))


def _joins_a_world(given: bool) -> tuple[int, int, float]:
    """The script, or the test, has made the world."""
    line = [*NO_DATA, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    with script(*line, "--distributed-backend", "gloo", world=not given) as args:
        assert args.sequence_parallel and args.world_size == 2
        layer = megatron.ColumnParallelLinear(4, 6, config=args, bias=False)
        total = layer(torch.ones(3, 1, 4))[0].detach().sum()
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return args.rank, parallel_state.get_tensor_model_parallel_rank(), round(float(total), 4)


def test_world_of_the_script(pool: Pool) -> None:
    seen = pool.run(2, _joins_a_world, True)
    assert [of_rank[:2] for of_rank in seen] == [(0, 0), (1, 1)] and seen[0][2] == seen[1][2]


def _under_a_launcher(rank: int, world: int, port: int) -> tuple[int, int, float]:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    variables |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, variables):
        return _joins_a_world(False)


def test_world_of_a_launcher(pool: Pool) -> None:
    assert pool.apart(2, _under_a_launcher, free_port()) == pool.run(2, _joins_a_world, True)


def _other_arguments(first: list[str], second: list[str], settings: list[str]) -> tuple[str, str]:
    """The error's kind and text where the ranks' lines differ, and flags that may."""
    rank = dist.get_rank()

    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--my-rank", type=int)

    own = ["--my-rank", str(rank), "--local-rank", str(rank), "--distributed-backend", "gloo"]
    options = {"settings": settings[:rank], "extra_args_provider": extra}
    try:
        with script(*NO_DATA, *own, *(second if rank else first), world=False, **options):
            return "", ""
    except HexadError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size: rank 0 has 1, rank 1 has 2"),
        ("--hidden-size 32", "", "--hidden-size: rank 0 has 32, rank 1 has 64"),
        ("--bf16", "", "--bf16: rank 0 has True, rank 1 has False"),
        ("", "--save runs/b", "--save: rank 0 has None, rank 1 has runs/b"),
    ],
)
def test_arguments_of_ranks_differ(pool: Pool, first: str, second: str, says: str) -> None:
    errors = pool.run(2, _other_arguments, first.split(), second.split(), [])
    assert errors == [("AgreedError", f"{says}; all ranks need the same")] * 2


def test_one_rank_fails(pool: Pool) -> None:
    """The others do not wait for it."""
    says = "rank 1: --tensor-model-parallel-size: found 3 x pipeline 1 x context 1, which do not divide the 2"
    for kind, text in pool.run(2, _other_arguments, [], ["--tensor-model-parallel-size", "3"], []):
        assert kind == "AgreedError" and text.startswith(says)
    errors = pool.run(2, _other_arguments, ["--bf"], ["--bf"], [])
    assert errors[0] == errors[1] and errors[0][1].startswith("--bf")


def test_what_may_differ_and_settings(pool: Pool) -> None:
    assert pool.run(2, _other_arguments, [], [], []) == [("", "")] * 2
    for kind, text in pool.run(2, _other_arguments, [], [], ["parallel.schedule=gpipe"]):
        assert kind == "AgreedError" and text.startswith("settings: rank 0 has (), rank 1 has ('parallel.")


def _mock_data(directory: str) -> int:
    with script(*SMALL, "--save", directory, "--distributed-backend", "gloo", world=False):
        config = megatron.get_config()
        with loader_from_config(config, dist.get_rank(), 2, load_tokenizer("byte")) as loader:
            return sum(1 for _ in loader.step(0))


def test_mock_data_of_a_script(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _mock_data, str(tmp_path / "run")) == [4, 4]


def _refused_mock_data(directory: str) -> str:
    try:
        _mock_data(directory)
    except HexadError as error:
        return str(error)
    return ""


def test_mock_data_that_cannot_be_written(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    errors = pool.run(2, _refused_mock_data, str(tmp_path / "file" / "run"))
    assert errors[0] == errors[1] and errors[0].startswith("--save: data cannot be written to"), errors


def _mesh_of_a_run() -> float:
    settings = {"run": {"dir": "runs/none", "device": "cpu"}, "precision": {"dtype": "fp64"}}
    with hexad.launch(hexad.load_config(settings)) as run:
        parallel_state.use_mesh(run.mesh)
        layer = megatron.ColumnParallelLinear(4, 6, config=megatron.ModelParallelConfig(torch.float64))
        total = layer(torch.ones(3, 1, 4, dtype=torch.float64))[0].detach().sum()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        parallel_state.destroy_model_parallel()
    assert not dist.is_initialized()
    return float(total)


def test_mesh_of_a_run(pool: Pool) -> None:
    assert pool.run(1, _mesh_of_a_run)[0] != 0


def test_import_needs_no_torch(tmp_path: Path) -> None:
    import subprocess

    script = "import sys, hexad.compat.megatron as m; dir(m); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=PATIENCE).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'GPT'"):
        megatron.GPT  # noqa: B018
    for name in megatron.__all__:
        assert getattr(megatron, name) is not None
