"""Modules whose hooks read and change gradients, or that optimize by hand."""

from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hexad

from .modules import Classifier, LanguageModel


class GradientNorms(LanguageModel):
    """Logs gradient norms, as Lightning's documentation does, and reads gradients after every backward
    pass."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.recorded.append(float(grad_norm(self, norm_type=2)["grad_2.0_norm_total"]))

    def on_after_backward(self) -> None:
        if (self.trainer.fit_loop.total_batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.recorded.append(float(self.head.weight.grad.abs().sum()))


class OwnClipping(LanguageModel):
    """Clips some gradients by itself, and calls Lightning's clipping for all; its own weight is used without
    a call of the module."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.forward(batch[0][:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        nn.utils.clip_grad_norm_(self.blocks[0].parameters(), 0.1)
        self.embedding.weight.grad[3] = 0.0
        self.position.grad = self.position.grad * 2
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


class Overflows(LanguageModel):
    """The gradient of a part of one weight, which one rank holds, is infinite in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].mlp[0].weight.register_hook(self.poisoned)

    def poisoned(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0, 0] *= torch.inf if self.trainer.fit_loop.total_batch_idx in (1, 4) else 1.0
        return gradient


class Manual(Classifier):
    """Optimizes by hand: two backward passes per step, every other batch accumulates, clipping, rates."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.recorded: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        optimizer: Any = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        loss = nn.functional.nll_loss(self(x), y)
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(loss)
        if batch_idx % 2 == 1:
            self.manual_backward(nn.functional.nll_loss(self(x.flip(0) * 2), y.flip(0)))
            self.recorded.append(float(self.head.weight.grad.norm()))
            if batch_idx == 1:
                nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            else:
                self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")
            optimizer.step()
            self.lr_schedulers().step()
        return {"loss": loss.detach()}


class Skips(Classifier):
    """Steps after every second batch by its own ``optimizer_step``, and warms up there."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + batch_idx)


class Partial(Classifier):
    """Its optimizer does not list all parameters; one is frozen, and one belongs to the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.unlisted = nn.Linear(2, 2)
        self.body[0].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.unlisted(x.new_ones(2)).sum()

    def configure_optimizers(self) -> Any:
        listed = [p for name, p in self.named_parameters() if p.requires_grad and "unlisted" not in name]
        return torch.optim.RMSprop(listed, lr=1e-3)


class TwoOptimizers(Classifier):
    """Has an optimizer for each part, and optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]


class Lbfgs(Classifier):
    """Its optimizer evaluates the loss several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class RowWise(torch.optim.SGD):
    """An optimizer that may look at complete parameters."""


class Unknown(Classifier):
    """Its optimizer is not torch's."""

    def configure_optimizers(self) -> Any:
        return RowWise(self.parameters(), lr=0.1)


class TwoFormats(Classifier):
    """Has parameters of two formats."""

    def __init__(self) -> None:
        super().__init__()
        self.head.double()


class ChangesSaved(Classifier):
    """Saves other weights than it has."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["head.bias"] = torch.zeros(4)


class LeavesOut(Classifier):
    """Saves only a part of its weights, as adapters do, and something else."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in [name for name in checkpoint["state_dict"] if not name.startswith("head")]:
            del checkpoint["state_dict"][name]
        checkpoint["mine"] = {"tensor": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]["tensor"].tolist(), sorted(checkpoint["state_dict"])


class NoOptimizer(Classifier):
    """Trains nothing."""

    def configure_optimizers(self) -> None:
        return None


class Configured(LanguageModel):
    """Makes its layers in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.made = nn.ModuleList(), None
        del self.norm, self.position

    def configure_model(self) -> None:
        if self.made is None:
            self.made = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.made is not None
        return self.head(self.made(self.embedding(tokens)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.made.parameters(), self.embedding.weight], lr=1e-3)


class Divided(LanguageModel):
    """Divides its layers over tensor ranks, under a strategy that has some."""

    divided = False

    def configure_model(self) -> None:
        mesh = getattr(self.trainer.strategy, "mesh", None)
        if mesh is None or self.divided:
            return
        self.divided = True
        plan = {"blocks.*.mlp.0": "column", "blocks.*.mlp.2": "row", "embedding": "vocab"}
        hexad.parallelize(self, mesh, plan | {"head": "column_gather"})


class Averaged(Classifier):
    """Keeps a moving average of its weights, as PyTorch's documentation does, in hooks of its own; validates
    it; bounds a layer's weights, as Wasserstein GANs do; one layer's weight serves without a call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[float] = []
        self.average = AveragedModel(self.body, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
        self.average.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(nn.functional.linear(self.body(x), self.head.weight, self.head.bias), dim=1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.body)
        self.recorded.append(float(self.head.weight.norm()))

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.clamp_(-0.2, 0.2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        scores = torch.log_softmax(self.head(self.average(batch[0])), dim=1)
        self.log("average_loss", nn.functional.nll_loss(scores, batch[1]), sync_dist=True)


class Zeroes(Classifier):
    """Sets a layer's weights to zero after every step, past autograd's counting of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.recorded.append(float(self.head.weight.abs().sum()))
        self.head.weight.data.zero_()
