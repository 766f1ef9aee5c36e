"""``initialize_megatron``: arguments, world, groups, seeds and tokenizer of a script."""

from __future__ import annotations

import argparse
import os
import socket
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

from ...pool import Pool
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


def _alone() -> None:
    def extra(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument_group("own").add_argument("--my-flag", type=float, default=0.5)
        return parser

    line = [*SMALL, "--my-flag", "2", "--bf16", "--distributed-backend", "gloo", "--seed", "7"]
    with script(*line, extra_args_provider=extra, args_defaults={"tokenizer_type": "X", "save": "s"}) as args:
        assert (args.my_flag, args.tokenizer_type, args.save) == (2.0, "NullTokenizer", "s")
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
        assert (config.model.hidden, config.run.dir, config.data.sequence) == (64, "s", 32)
        with pytest.raises(HexadError, match="called before"):
            megatron.initialize_megatron()
    with pytest.raises(HexadError, match="there is no mesh"):
        parallel_state.get_tensor_model_parallel_group()
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


def test_world_of_one(pool: Pool) -> None:
    pool.run(1, _alone)


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
    found = pool.run(2, _joins_a_world, True)
    assert [each[:2] for each in found] == [(0, 0), (1, 1)] and found[0][2] == found[1][2]


def _under_a_launcher(rank: int, world: int, port: int) -> tuple[int, int, float]:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    variables |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, variables):
        return _joins_a_world(False)


def test_world_of_a_launcher(pool: Pool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert pool.apart(2, _under_a_launcher, port) == pool.run(2, _joins_a_world, True)


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
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'GPT'"):
        megatron.GPT  # noqa: B018
    for name in megatron.__all__:
        assert getattr(megatron, name) is not None
