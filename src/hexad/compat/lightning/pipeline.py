"""LightningModules of layers that a user lists, in pipeline stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from hexad.config import HexadError
from hexad.conversion.pipeline import pipelined_layers
from hexad.engine.engine import Engine
from hexad.model.configuration import load_config
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh

from .module import EngineModule, layout_of_module
from .training import MANNERS, engine_settings

log = logging.getLogger("hexad")


@dataclass(frozen=True)
class Piece:
    """A microbatch.

    Attributes:
        batch: a part of the loader's.
        part: its samples, as a fraction of those of the step on this data rank.
    """

    batch: Any
    part: float


class PipelineModule(EngineModule):
    """Layers of a user's own, divided into the stages of pipeline ranks, under :class:`HexadStrategy`.

    Override :meth:`pipeline_layers`, :meth:`loss` and ``configure_optimizers``. A batch of the loader has all
    samples of a step on a data rank; it is cut into microbatches.

    Args:
        microbatches: of a step on a data rank, at most one for each sample.
    """

    def __init__(self, microbatches: int = 1) -> None:
        super().__init__()
        if not isinstance(microbatches, int) or microbatches < 1:
            raise HexadError(f"PipelineModule: found microbatches={microbatches!r}, expected 1 or more")
        self.microbatches = microbatches
        self._clip = 0.0

    # To be overridden

    def pipeline_layers(self) -> Sequence[nn.Module]:
        """The layers, the same on all ranks, each of which takes what the one before returns: a tensor, or
        several and None. Those of other ranks' stages are used up. To divide them over tensor ranks too, call
        :func:`hexad.parallelize` with ``self.trainer.strategy.mesh`` before."""
        raise NotImplementedError("override pipeline_layers")

    def loss(self, output: Any, batch: Any) -> Tensor:
        """A scalar, the mean over the samples of a microbatch, given the last layer's result."""
        raise NotImplementedError("override loss")

    def inputs(self, batch: Any) -> Any:
        """What the first layer takes of a microbatch; by default the first of several parts, or all."""
        return batch[0] if isinstance(batch, list | tuple) else batch

    def boundary(self, batch: Any) -> tuple[int, ...]:
        """The shape of the tensor that a stage passes to the next, of a microbatch; where this is not
        overridden, a forward pass finds what is passed on."""
        raise NotImplementedError("override boundary")

    # Setting up

    def layout(self, ranks: int, named: Mapping[str, Any]) -> Layout:
        """The layout of so many ranks."""
        self._parallel = load_config({"parallel": dict(named)}).parallel
        return layout_of_module("PipelineModule", named, ranks)

    def make_engine(self, mesh: Mesh, training: bool, optimizer: Any) -> Engine:
        """An engine of this rank's stages, with the values that the layers have."""
        layers, parallel = self.pipeline_layers(), self._parallel
        named = is_overridden("boundary", self, PipelineModule)
        pipelined = pipelined_layers(
            layers,
            mesh,
            lambda stage, piece: stage(self.inputs(piece.batch)),
            self._weighted,
            (lambda piece: self.boundary(piece.batch)) if named else None,
            parallel.schedule,
            parallel.virtual_stages,
            "cost",
        )
        settings = engine_settings(nn.ModuleList(layers), parallel, 1800.0)
        return pipelined.engine(settings, optimizer, training, MANNERS)

    def _weighted(self, output: Any, piece: Piece) -> Tensor:
        return self.loss(output, piece.batch) * piece.part

    # A step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Forward and backward passes of a step by the pipeline's schedule; ``train_loss`` is logged."""
        loss = self.run_schedule(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def run_schedule(self, batch: Any) -> Tensor:
        """Forward and backward passes of a step, and the reduction of gradients, all ranks together; returns
        this data rank's mean loss, float64, on all its ranks. The optimizer's step updates."""
        engine, pieces = self._made(), self._pieces(batch, self.microbatches)
        engine.begin(len(pieces))
        total = engine.accumulate(pieces, 1 / engine.mesh.data.size)
        engine.reduce()
        return engine.on_all_stages(total)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """The loss of a batch, without gradients; ``val_loss`` is logged, the mean over all samples."""
        loss, size = self.evaluated(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=size)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate like :meth:`validation_step`; ``test_loss`` is logged."""
        loss, size = self.evaluated(batch)
        self.log("test_loss", loss, sync_dist=True, batch_size=size)
        return loss

    def evaluated(self, batch: Any) -> tuple[Tensor, int]:
        """This data rank's mean loss, float64, and the number of samples; all ranks together."""
        engine = self._made()
        # In ZeRO 3 all ranks gather weights for each microbatch; the last batches differ in size.
        count = 1 if engine.config.parallel.zero == 3 else self.microbatches
        with self.evaluation_mode():
            total = engine.total_loss(self._pieces(batch, count))
        return engine.on_all_stages(total), _samples(batch)

    def _pieces(self, batch: Any, most: int) -> list[Piece]:
        """A batch's microbatches."""
        samples = _samples(batch)
        count = min(most, samples)
        ends = [samples * number // count for number in range(count + 1)]
        return [Piece(_cut(batch, begin, end), (end - begin) / samples) for begin, end in pairwise(ends)]

    def update(self) -> None:
        """Clip and update with reduced gradients; the optimizer's step calls it."""
        engine = self._made()
        engine.optimizer.clip, self._clip = self._clip, 0.0
        before = engine.updates
        engine.update(None)
        if engine.updates == before and not engine.mesh.rank:
            log.warning("step %d: gradients are not finite, nothing is updated", engine.step)

    def clip(self, norm: float) -> None:
        """Clip the next step by the norm of all ranks' gradient."""
        self._clip = norm

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """No-op: :meth:`run_schedule` has made the backward passes."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """No-op: a step begins without gradients."""


def _tensors(batch: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch
    parts = values if isinstance(batch, Mapping | list | tuple) else []
    return [tensor for part in parts for tensor in _tensors(part)]


def _samples(batch: Any) -> int:
    """Samples of a batch: the first dim of its tensors.

    Raises:
        HexadError: they differ, or there are none.
    """
    sizes = sorted({tensor.shape[0] if tensor.dim() else 0 for tensor in _tensors(batch)})
    if len(sizes) != 1 or not sizes[0]:
        raise HexadError(
            f"PipelineModule: found a batch of {sizes} samples, expected one number in all tensors"
        )
    return sizes[0]


def _cut(batch: Any, begin: int, end: int) -> Any:
    """Some samples of a batch."""
    if isinstance(batch, Tensor):
        return batch[begin:end]
    if isinstance(batch, Mapping):
        return {key: _cut(value, begin, end) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_cut(value, begin, end) for value in batch)
    return batch
