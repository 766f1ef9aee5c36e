"""A BERT-like encoder with NeMo 2's hooks, as BioNeMo's modules have, on data, tensor and pipeline ranks.

    torchrun --nproc-per-node 4 examples/nemo_bert.py --tensor 2 --pipeline 2 --steps 40

It learns to fill in masked bytes of Python's own documentation.
"""

import argparse
import os
import pydoc_data.topics
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hexad.compat.megatron import (
    ColumnParallelLinear,
    MegatronModule,
    ModelParallelConfig,
    OptimizerConfig,
    RowParallelLinear,
    VocabParallelEmbedding,
    parallel_state,
    vocab_parallel_cross_entropy,
)
from hexad.compat.nemo import (
    MaskedTokenLossReduction,
    MegatronDataSampler,
    MegatronOptimizerModule,
    MegatronStrategy,
)
from hexad.compat.nemo.optim import CosineAnnealingScheduler

MASK, VOCAB = 256, 320  # bytes, the mask, and padding that tensor ranks divide


@dataclass
class BertConfig(ModelParallelConfig):
    """The model's sizes."""

    num_layers: int = 4
    hidden_size: int = 64
    num_attention_heads: int = 4
    seq_length: int = 64

    def configure_model(self) -> "Bert":
        """This rank's stage."""
        return Bert(self)


class Layer(nn.Module):
    """Attention in both directions, and a feed-forward network, over ``[s, b, h]``."""

    def __init__(self, config: BertConfig, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)  # initial values are the same on any number of ranks
        width = config.hidden_size
        self.head_dim = width // config.num_attention_heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, dtype=config.params_dtype) for _ in range(2))
        # The features of a head are together: its query, key and value.
        self.qkv = ColumnParallelLinear(width, 3 * width, config=config)
        self.proj = RowParallelLinear(width, width, config=config)
        self.up = ColumnParallelLinear(width, 4 * width, config=config)
        self.down = RowParallelLinear(4 * width, width, config=config)
        for parameter in (*self.norm1.parameters(), *self.norm2.parameters()):
            parameter.sequence_parallel = config.sequence_parallel  # as in Megatron-LM

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after this layer."""
        mixed, _ = self.qkv(self.norm1(x))
        query, key, value = mixed.unflatten(2, (-1, 3, self.head_dim)).permute(3, 1, 2, 0, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.proj(attended.permute(2, 0, 1, 3).flatten(2))[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))[0]))[0]


class Bert(MegatronModule):
    """This rank's stage: embeddings on the first, the head on the last."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.first = parallel_state.is_pipeline_first_stage(ignore_virtual=False)
        self.last = parallel_state.is_pipeline_last_stage(ignore_virtual=False)
        if self.first:
            torch.manual_seed(1000)
            self.words = VocabParallelEmbedding(
                VOCAB, config.hidden_size, config=config, reduce_scatter_embeddings=config.sequence_parallel
            )
            self.places = VocabParallelEmbedding(
                config.seq_length,
                config.hidden_size,
                config=config,
                reduce_scatter_embeddings=config.sequence_parallel,
            )
        # Numbered over the whole model, so that checkpoints fit any number of stages.
        self.layers = nn.ModuleDict({str(number): Layer(config, number) for number in self.own_layers()})
        if self.last:
            torch.manual_seed(2000)
            self.norm = nn.LayerNorm(config.hidden_size, dtype=config.params_dtype)
            for parameter in self.norm.parameters():
                parameter.sequence_parallel = config.sequence_parallel
            self.head = ColumnParallelLinear(config.hidden_size, VOCAB, config=config)
        self.inputs: Tensor | None = None

    def own_layers(self) -> range:
        """The numbers of this stage's layers."""
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
        each = self.config.num_layers // (ranks * chunks)
        stage = chunk * ranks + parallel_state.get_pipeline_model_parallel_rank()
        return range(stage * each, (stage + 1) * each)

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """What the stage before has computed."""
        self.inputs = input_tensor

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Losses ``[b, s]`` on the last stage, else hidden states ``[s (/ ranks), b, h]``."""
        if self.first:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            x = self.words(tokens) + self.places(places)
            x = x if self.config.sequence_parallel else x.transpose(0, 1)
        else:
            assert self.inputs is not None
            x = self.inputs
        for layer in self.layers.values():
            x = layer(x)
        if not self.last:
            return x.contiguous()
        logits, _ = self.head(self.norm(x))
        return vocab_parallel_cross_entropy(logits.transpose(0, 1).contiguous(), labels)


class BertModule(pl.LightningModule):
    """The four hooks, and an optimizer."""

    def __init__(self, config: BertConfig, optim: MegatronOptimizerModule) -> None:
        super().__init__()
        self.config = config
        optim.connect(self)

    def configure_model(self) -> None:
        """Make this rank's stage."""
        self.module = self.config.configure_model()

    def data_step(self, dataloader_iter):
        """The next microbatch."""
        batch, _, _ = next(dataloader_iter)
        return batch

    def forward_step(self, batch):
        """What this stage computes."""
        return self.module(batch["tokens"], batch["labels"])

    def training_step(self, batch, batch_idx=None):
        """What the last stage computes."""
        return self.forward_step(batch)

    validation_step = training_step

    def training_loss_reduction(self):
        """The mean over masked tokens."""
        return MaskedTokenLossReduction()

    validation_loss_reduction = training_loss_reduction


class MaskedText(Dataset):
    """Bytes of Python's documentation, some of which are masked."""

    def __init__(self, length: int, begin: float, end: float) -> None:
        data = "\n".join(pydoc_data.topics.topics.values()).encode()
        self.data = data[int(begin * len(data)) : int(end * len(data))]
        self.length = length

    def __len__(self) -> int:
        return len(self.data) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = torch.tensor(list(self.data[index * self.length : (index + 1) * self.length]))
        masked = torch.rand(self.length, generator=torch.Generator().manual_seed(index)) < 0.15
        return {"tokens": labels.masked_fill(masked, MASK), "labels": labels, "loss_mask": masked.float()}


class Text(pl.LightningDataModule):
    """The data, and the sampler that divides it among ranks."""

    def __init__(self, length: int, micro_batch_size: int, global_batch_size: int) -> None:
        super().__init__()
        self.length = length
        self.data_sampler = MegatronDataSampler(length, micro_batch_size, global_batch_size)

    def train_dataloader(self) -> DataLoader:
        """The first nine tenths."""
        return DataLoader(MaskedText(self.length, 0.0, 0.9))

    def val_dataloader(self) -> DataLoader:
        """The rest."""
        return DataLoader(MaskedText(self.length, 0.9, 1.0))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    optim = MegatronOptimizerModule(
        OptimizerConfig(lr=3e-3, weight_decay=0.1, use_distributed_optimizer=True),
        CosineAnnealingScheduler(warmup_steps=10, constant_steps=0, min_lr=3e-4),
    )
    strategy = MegatronStrategy(
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        sequence_parallel=options.sequence_parallel,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_steps=options.steps,
        val_check_interval=options.steps // 2,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=pl.loggers.CSVLogger("runs/nemo-bert"),
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    config = BertConfig(sequence_parallel=options.sequence_parallel)
    trainer.fit(BertModule(config, optim), Text(config.seq_length, 4, 32))


if __name__ == "__main__":
    main()
