"""NeMo's names: scripts' imports, samplers, and what is refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hexad.config import HexadError

from ... import forks
from ...pool import Pool

pytest.importorskip("lightning")

SCRIPT = """
import hexad.compat.nemo
hexad.compat.nemo.install()

import lightning.pytorch as pl
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.common.tokenizers import SentencePieceTokenizer
from nemo.collections.llm.api import finetune, pretrain, train
from nemo.collections.llm.gpt.data import ChatDataModule, MockDataModule, PreTrainingDataModule
from nemo.collections.llm.gpt.data.packed_sequence import PackedSequenceSpecs
from nemo.collections.llm.gpt.model.llama import Llama3Config8B, LlamaModel
from nemo.collections.llm.peft import PEFT_STR2CLS
from nemo.collections.nlp.modules.common.tokenizer_utils import get_nmt_tokenizer, get_tokenizer
from nemo.lightning import AutoResume, NeMoLogger, io, resume
from nemo.lightning.megatron_parallel import DataT, MegatronLossReduction, ReductionT
from nemo.lightning.pytorch import callbacks as nl_callbacks
from nemo.lightning.pytorch.callbacks import ModelCheckpoint
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from nemo.utils import logging
from nemo.utils.exp_manager import TimingCallback
from dataclasses import dataclass

@dataclass
class Small(llm.Llama3Config8B):
    num_layers: int = 2
    hidden_size: int = 64

@dataclass
class Config(ModelParallelConfig):
    calculate_per_token_loss: bool = False

class Module(pl.LightningModule, io.IOMixin, io.ConnectorMixin):
    def training_loss_reduction(self):
        return MegatronLossReduction()

assert nl.MegatronStrategy is hexad.compat.nemo.MegatronStrategy
assert llm.LlamaModel(Small()).architecture.num_attention_heads == 32
assert Config().tensor_model_parallel_size is None
Module()
try:
    llm.SquadDataModule(seq_length=8)
except Exception as error:
    print(error)
"""


def test_scripts_imports(tmp_path: Path) -> None:
    """What NeMo's examples and BioNeMo's modules import, in a process of its own."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    result = forks.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    refusal = "nemo.collections.llm.SquadDataModule: not supported: write training.jsonl and use"
    assert result.stdout.startswith(refusal)


class Numbers:
    """A data set of numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def steps_of(sampler: Any, samples: int, ranks: int, consumed: int = 0) -> list[list[int]]:
    """The samples of the steps of a pass, all ranks' together, in the order of microbatches."""
    from torch.utils.data import DataLoader

    from hexad.topology.mesh import Axis

    loader = DataLoader(Numbers(samples), collate_fn=list)  # type: ignore[arg-type, var-annotated]
    parts = [
        list(sampler.training(loader, Axis("data", tuple(range(ranks)), rank), lambda: consumed))
        for rank in range(ranks)
    ]
    return [[n for micros in zip(*step) for micro in micros for n in micro] for step in zip(*parts)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_single_sampler(ranks: int) -> None:
    """Every rank's microbatches of a step are the step's samples in their order, as Megatron-LM's."""
    from hexad.compat.nemo import MegatronDataSampler

    sampler = MegatronDataSampler(8, 2, 8)
    assert steps_of(sampler, 27, ranks) == [list(range(n, n + 8)) for n in (0, 8, 16)]
    assert steps_of(sampler, 27, ranks, 16) == [list(range(16, 24))]
    assert steps_of(sampler, 27, ranks, 24)[0] == list(range(8))  # the second pass


def test_other_samplers() -> None:
    from hexad.compat.nemo import MegatronDataSampler

    growing = MegatronDataSampler(8, 2, 8, [4, 2, 12])
    sizes = [len(step) for step in steps_of(growing, 40, 1)]
    assert sizes == [4, 4, 6, 8, 8, 8]  # Megatron-LM's ramp: 4 to 8 by 2 over 12 samples
    assert [len(step) for step in steps_of(growing, 40, 1, 8)] == [6, 8, 8, 8]
    shuffled = MegatronDataSampler(8, 2, 8, dataloader_type="cyclic")
    passes = [[n for step in steps_of(shuffled, 24, 2, consumed) for n in step] for consumed in (0, 24)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(24))
    assert passes[0] != passes[1]
    turns = MegatronDataSampler(8, 2, 8, dataloader_type="batch")
    assert [sorted(step) for step in steps_of(turns, 17, 2)] == [list(range(8)), list(range(8, 16))]


def test_too_few_samples() -> None:
    from torch.utils.data import DataLoader

    from hexad.compat.nemo import MegatronDataSampler
    from hexad.topology.mesh import Axis

    with pytest.raises(HexadError, match="found 6 samples, less than a step of 8"):
        steps_of(MegatronDataSampler(8, 2, 8, [4, 4, 8]), 6, 1)
    loader = DataLoader(Numbers(6), collate_fn=list)  # type: ignore[arg-type, var-annotated]
    with pytest.raises(HexadError, match="found 6 samples to evaluate, less than a step of 8"):
        MegatronDataSampler(8, 2, 8).evaluation(loader, Axis("data", (0,), 0), 1, True)


def test_arguments_of_schedules() -> None:
    """In NeMo's order."""
    from hexad.compat.nemo import lr_scheduler

    schedule = lr_scheduler.WarmupPolicyScheduler(5, None, 100)
    assert (schedule.warmup_steps, schedule.max_steps) == (5, 100)
    assert schedule.settings(-1) == {"kind": "constant", "warmup": 6}


def test_predictions_of_uneven_samples() -> None:
    """One process predicts them all; ranks that exchange whole microbatches are refused."""
    from torch.utils.data import DataLoader

    from hexad.compat.nemo import MegatronDataSampler
    from hexad.topology.mesh import Axis

    sampler = MegatronDataSampler(8, 2, 4)
    loader = DataLoader(Numbers(9), collate_fn=list)  # type: ignore[arg-type, var-annotated]
    alone, two = Axis("data", (0,), 0), Axis("data", (0, 1), 0)
    assert list(sampler.evaluation(loader, alone, 1, False)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8]]]
    for data, stages in ((alone, 2), (two, 1)):
        with pytest.raises(HexadError, match="found 9 samples to predict, expected a multiple of"):
            sampler.evaluation(loader, data, stages, False)


def _directory(directory: str) -> str:
    """Of an experiment, by a clock that differs between ranks."""
    import time

    import torch.distributed as dist

    from hexad.compat import nemo as nl

    from ..lightning.program import launched

    real = time.strftime
    with launched() as world:
        trainer = nl.Trainer(accelerator="cpu", devices=world, strategy=nl.MegatronStrategy(), logger=False)
        time.strftime = lambda *_: f"time-{dist.get_rank()}"  # type: ignore[assignment]
        try:
            return str(nl.NeMoLogger("name", directory).setup(trainer).log_dir)
        finally:
            time.strftime = real


def test_ranks_have_one_directory(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _directory, str(tmp_path)) == [str(tmp_path / "name" / "time-0")] * 2


def _recipe(**change: Any) -> Callable[[], Any]:
    """Settings of a recipe, with some objects' arguments changed."""

    def settings() -> Any:
        from hexad.compat import nemo as nl
        from hexad.compat.nemo import llm
        from hexad.compat.nemo.recipe import recipe_settings

        sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
        config = change.get("config", {})
        options = {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 4,
            "logger": False,
            **change.get("trainer", {}),
        }
        model = llm.LlamaModel(llm.Llama3Config(**{**sizes, "seq_length": 16, **config}))
        data = change.get("data") or llm.MockDataModule(16, micro_batch_size=1, global_batch_size=2)
        trainer = nl.Trainer(strategy=nl.MegatronStrategy(**change.get("strategy", {})), **options)
        if "optim" in change:
            change["optim"]().connect(model)
        trainer.strategy.shard_as(model)
        return recipe_settings(trainer, model, data, "runs/none")

    return settings


def _optimizer(**config: Any) -> Any:
    from hexad.compat import nemo as nl
    from hexad.compat.megatron import OptimizerConfig

    return nl.MegatronOptimizerModule(OptimizerConfig(**config), nl.lr_scheduler.CosineAnnealingScheduler())


def _strategy(*given: int) -> Any:
    from hexad.compat.nemo import MegatronStrategy

    return MegatronStrategy(*given)


def _paths(**paths: str) -> Callable[[], Any]:
    def made() -> Any:
        from hexad.compat.nemo import llm

        return llm.PreTrainingDataModule(paths, 16)

    return made


def _restored(**given: Any) -> Callable[[], Any]:
    def made() -> Any:
        from hexad.compat.nemo import RestoreConfig

        return RestoreConfig("somewhere", **given)

    return made


def _tokenizer(name: str, *values: Any, **named: Any) -> Callable[[], Any]:
    def make() -> Any:
        from hexad.compat.nemo import tokenizers

        return getattr(tokenizers, name)(*values, **named)

    return make


def _packed(**specs: Any) -> Callable[[], Any]:
    def make() -> Any:
        from hexad.compat.nemo import llm
        from hexad.compat.nemo.data import PackedSequenceSpecs

        return llm.FineTuningDataModule("none", 16, packed_sequence_specs=PackedSequenceSpecs(**specs))

    return make


def _chat() -> Any:
    from hexad.compat.nemo import llm

    return llm.ChatDataModule("none", use_hf_tokenizer_chat_template=False)


def _adapters(**named: Any) -> Callable[[], Any]:
    def make() -> Any:
        from hexad.compat.nemo import llm

        return llm.peft.LoRA(**named).settings()

    return make


def _generated(add_BOS: bool = False, **named: Any) -> Callable[[], Any]:
    def make() -> Any:
        from hexad.compat.megatron.settings import CommonInferenceParams
        from hexad.compat.nemo import llm

        params = CommonInferenceParams(**named)
        return llm.generate("none", prompts=["a"], inference_params=params, add_BOS=add_BOS)

    return make


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown argument": (_recipe(strategy={"tensor_parallel": 2}), "unexpected argument 'tensor_parallel'"),
    "experts": (_recipe(config={"num_moe_experts": 8}), "GPTConfig.num_moe_experts: found 8"),
    "activation": (
        _recipe(config={"gated_linear_unit": False}),
        "GPTConfig.activation_func: found silu without gated_linear_unit",
    ),
    "norm": (_recipe(config={"normalization": "LayerNorm"}), "normalization: found LayerNorm"),
    "heads": (_recipe(config={"num_attention_heads": 5}), "hidden_size: found 32, which 5 heads"),
    "length": (_recipe(config={"seq_length": 8}), "seq_length: found 16 in the data and 8"),
    "steps": (_recipe(trainer={"max_steps": -1, "max_epochs": 1}), "found max_steps=-1; name the steps"),
    "precision": (_recipe(trainer={"precision": "bf16-mixed"}), "pass plugins=MegatronMixedPrecision"),
    "degrees": (_recipe(strategy={"tensor_model_parallel_size": 2}), "tensor_model_parallel_size: found 2 x"),
    "optimizer": (_recipe(optim=lambda: _optimizer(lr=0.1, optimizer="sgd")), "found 'sgd'; use adam"),
    "layers": (_recipe(config={"transformer_layer_spec": object()}), "GPTConfig.transformer_layer_spec"),
    "paths": (_paths(train="a"), "found paths of train; name train and validation"),
    "state": (_restored(load_optim_state=True), "found load_optim_state=True; to resume with all"),
    "position": (lambda: _strategy(2, 2, 2), "positional argument"),
    "rate": (_recipe(optim=_optimizer), "OptimizerConfig.lr: found None"),
    "schedule": (
        _recipe(optim=lambda: _optimizer(lr=0.1)),
        "found warmup_steps=750 and constant_steps=80000 of 4 steps",
    ),
    "function": (_recipe(config={"forward_step_fn": print}), "GPTConfig.forward_step_fn: found builtin"),
    "ddp": (
        _recipe(strategy={"ddp": {"use_distributed_optimizer": True}}),
        "found ddp={'use_distributed_optimizer': True}, expected megatron, pytorch or a Distr",
    ),
    "accumulation": (_recipe(trainer={"accumulate_grad_batches": 4}), "found accumulate_grad_batches=4; set"),
    "weights": (_restored(load_model_state=False), "found load_model_state=False; leave restore_config out"),
    "begin token": (_tokenizer("AutoTokenizer", "byte", include_special_tokens=True), "special_tokens True"),
    "end token": (_tokenizer("AutoTokenizer", "byte", eos_token="<end>"), "found eos_token '<end>'"),
    "further tokens": (_tokenizer("get_tokenizer", "byte", special_tokens={"a": "b"}), "special_tokens dict"),
    "token typo": (
        _tokenizer("AutoTokenizer", "byte", eos="<end>"),
        "AutoTokenizer: unexpected argument 'eos'",
    ),
    "pieces": (_tokenizer("SentencePieceTokenizer", "x", special_tokens=["a"]), "found special_tokens list"),
    "template": (
        _tokenizer("get_nmt_tokenizer", tokenizer_model="x", chat_template="y"),
        "found chat_template with library='sentencepiece'; it is for huggingface",
    ),
    "packed file": (_packed(packed_train_data_path="a.npy"), "found packed_train_data_path='a.npy'; leave"),
    "packed size": (
        _packed(packed_sequence_size=32),
        "packed_sequence_size=32 with seq_length=16; make them",
    ),
    "conversations": (_chat, "found use_hf_tokenizer_chat_template=False; pass True"),
    "adapters": (_adapters(lora_A_init_method="uniform"), "lora_A_init_method='uniform', expected 'xavier'"),
    "adapters' rows": (
        _adapters(lora_B_init_method="normal"),
        "lora_B_init_method='normal', expected 'zero'",
    ),
    "adapters' format": (_adapters(lora_dtype="bf16"), "found lora_dtype='bf16', expected None"),
    "first token": (_generated(add_BOS=True), "generate: found add_BOS True; it is not supported"),
    "probabilities": (_generated(return_log_probs=True), "found inference_params.return_log_probs=True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises((HexadError, TypeError)) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value)


def test_template_of_any_function() -> None:
    """A chat template is the tokenizer's, whichever function makes it."""
    from hexad.compat.nemo import tokenizers

    named = {"chat_template": "{{ messages }}"}
    made = [tokenizers.AutoTokenizer("byte", **named), tokenizers.get_tokenizer("byte", **named)]
    made.append(tokenizers.get_nmt_tokenizer("huggingface", "byte", use_fast=True, **named))
    assert [tokenizer.chat_template for tokenizer in made] == ["{{ messages }}"] * 3


def test_tensorboard_keeps_its_options(tmp_path: Path) -> None:
    """A logger that writes into the experiment's directory has the options that it is made with."""
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger

    from hexad.compat import nemo as nl

    trainer = nl.Trainer(accelerator="cpu", devices=1, strategy=nl.MegatronStrategy(), logger=False)
    board = TensorBoardLogger("elsewhere", name="other", prefix="first", sub_dir="part")
    nl.NeMoLogger("run", str(tmp_path), version="v1", tensorboard=board).setup(trainer)
    logger: Any = trainer.logger
    assert logger._prefix == "first"
    assert logger.log_dir == str(tmp_path / "tb_logs" / "run" / "v1" / "part")
