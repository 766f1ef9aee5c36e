"""LightningModules of public tutorials' shapes, with their data, unchanged for any strategy."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Classifier(LightningModule):
    """An image classifier with batch normalisation, as in Lightning's CIFAR tutorial: SGD, OneCycleLR by
    steps."""

    def __init__(self, lr: float = 0.05, classes: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.head(self.body(x)), dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self(x)
        self.log("val_loss", nn.functional.nll_loss(scores, y), sync_dist=True)
        self.log("val_acc", (scores.argmax(1) == y).to(x.dtype).mean(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", nn.functional.nll_loss(self(x), y), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> Any:
        lr = self.hparams["lr"]
        optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * lr, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FineTune(LightningModule):
    """A ``transformers`` classifier, as in the GLUE tutorial: AdamW with two groups, warm-up by steps."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.save_hyperparameters()
        sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
        config = BertConfig(
            vocab_size=50, num_hidden_layers=2, max_position_embeddings=16, num_labels=3, **sizes
        )
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = self.model(input_ids=tokens, labels=labels).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, labels = batch
        self.log("val_loss", self.model(input_ids=tokens, labels=labels).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        plain = [
            p for name, p in self.model.named_parameters() if name.endswith("bias") or "LayerNorm" in name
        ]
        others = [p for p in self.model.parameters() if not any(p is q for q in plain)]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], eps=1e-8)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class LanguageModel(LightningModule):
    """A small GPT, as in Lightning's language-model examples: tied embeddings, Adam, ReduceLROnPlateau."""

    def __init__(self, width: int = 16, vocabulary: int = 40) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(12, width) * 0.02)  # of the module itself
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch[0][:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


def dataset(kind: str, samples: int, dtype: torch.dtype, seed: int = 7) -> Dataset[Any]:
    """Samples for a module of this file."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "classifier":
        images = torch.randn(samples, 3, 8, 8, generator=draw).to(dtype)
        return TensorDataset(images, torch.randint(4, (samples,), generator=draw))
    if kind == "fine-tune":
        tokens = torch.randint(50, (samples, 10), generator=draw)
        return TensorDataset(tokens, torch.randint(3, (samples,), generator=draw))
    return TensorDataset(torch.randint(40, (samples, 11), generator=draw))


def loader(kind: str, samples: int, dtype: torch.dtype, shuffle: bool, batch: int = 3) -> DataLoader[Any]:
    """A loader of those samples, as a script makes it for one process."""
    return DataLoader(dataset(kind, samples, dtype), batch_size=batch, shuffle=shuffle)


MODULES = {"classifier": Classifier, "fine-tune": FineTune, "language": LanguageModel}
