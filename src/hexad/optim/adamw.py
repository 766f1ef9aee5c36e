"""AdamW on flat buffers, with the global gradient norm and clipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hexad.comm import all_reduce
from hexad.config.schema import OptimizerSettings
from hexad.parallel.data import FlatGroup
from hexad.parallel.sharding import Piece
from hexad.topology.mesh import Axis

_STATE = ("exp_avg", "exp_avg_sq")


class FlatAdamW:
    """PyTorch's fused AdamW over each group's master buffer.

    Args:
        groups: flat parameter groups; those whose kind says so get weight decay.
        settings: ``optimizer`` settings.
        tensor: the tensor axis, over which sharded gradients' norms are summed.
        pipeline: the pipeline axis, over which the stages' norms are summed.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], settings: OptimizerSettings, tensor: Axis, pipeline: Axis
    ) -> None:
        self.groups = groups
        self.settings = settings
        self.tensor = tensor
        self.pipeline = pipeline
        for group in groups:
            group.master.grad = group.gradients
        self._adamw = torch.optim.AdamW(
            [
                {"params": [g.master], "weight_decay": settings.weight_decay if g.kind.decay else 0.0}
                for g in groups
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        for group in groups:
            self._adamw.state[group.master] = {
                "step": torch.zeros((), dtype=torch.float32, device=group.master.device),
                **{name: torch.zeros_like(group.master) for name in _STATE},
            }

    def gradient_norm(self) -> torch.Tensor:
        """Euclidean norm of the whole model's gradient, as a scalar tensor.

        Parameters divided over the tensor axis are summed over it; those that several ranks hold count once.
        """
        squares = self.groups[0].gradients.new_zeros(2)
        for group in self.groups:
            if not group.kind.copy:
                square = torch.linalg.vector_norm(group.gradients).square()
                squares[0 if group.kind.sharded else 1] += square
        of_stages = all_reduce(squares[:1], self.tensor) + squares[1]
        return all_reduce(of_stages, self.pipeline)[0].sqrt()

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        """Clip to ``optimizer.clip`` and update at learning rate ``lr``; returns the norm before clipping.

        A norm that is not finite leaves everything unchanged.
        """
        norm = self.gradient_norm()
        if not torch.isfinite(norm):
            return norm
        clip = self.settings.clip
        if clip and norm > clip:
            for group in self.groups:
                group.gradients.mul_(clip / norm)
        for parameter_group in self._adamw.param_groups:
            parameter_group["lr"] = lr
        self._adamw.step()
        for group in self.groups:
            group.publish()
        return norm

    def set_updates(self, count: int) -> None:
        """Tell Adam's bias correction how many updates have been made (after loading a checkpoint)."""
        for group in self.groups:
            self._adamw.state[group.master]["step"].fill_(count)

    def pieces(self) -> Iterator[tuple[str, Piece, torch.Tensor]]:
        """(state name, piece, local values) of all the optimizer keeps per parameter."""
        for group in self.groups:
            for name in _STATE:
                for piece, values in group.pieces(self._adamw.state[group.master][name]):
                    yield name, piece, values
