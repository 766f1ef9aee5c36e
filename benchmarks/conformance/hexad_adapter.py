"""Hexad's engine."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hexad import Engine, Layout, Mesh, Microbatch, load_config
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.model.experts import MixtureOfExperts
from hexad.parallel.rectangle import Rectangle

from .scenario import Adapter, Outcome, Piece, Sample, Scenario, Tensors

_NAMES = {
    "embedding.weight": "embedding",
    "norm.weight": "norm",
    "head.weight": "head",
    "attention_norm.weight": "attention_norm",
    "ffn_norm.weight": "ffn_norm",
    "attention.q.weight": "q",
    "attention.k.weight": "k",
    "attention.v.weight": "v",
    "attention.out.weight": "out",
    "ffn.router.weight": "router",
    "ffn.router.bias": "bias",
    "ffn.experts.down": "experts.down",
}


def _canonical(name: str) -> str:
    parts = name.split(".")
    layer = ".".join(parts[:2]) + "." if parts[0] == "layers" else ""
    return layer + _NAMES.get(name.removeprefix(layer), name.removeprefix(layer))


class HexadAdapter(Adapter):
    """An engine on every rank."""

    name, package = "hexad", "hexad"
    dispatcher = "auto"

    @classmethod
    def refusal(cls, scenario: Scenario) -> str | None:
        """Nothing."""
        return None

    def build(self, scenario: Scenario) -> None:
        """See the base class."""
        self.scenario = scenario
        self.mesh = self.mesh_of(scenario)
        self.engine = Engine(load_config(self._tree(scenario, "unused")), self.mesh)

    @classmethod
    def mesh_of(cls, scenario: Scenario) -> Mesh:
        """The mesh of a scenario's ranks, which all make it together."""
        parallel = load_config(cls._tree(scenario, "unused")).parallel
        world = dist.get_world_size() if dist.is_initialized() else 1
        return Mesh.create(Layout.from_settings(parallel, world), torch.device("cpu"))

    @classmethod
    def _tree(cls, scenario: Scenario, directory: str) -> dict[str, Any]:
        sizes, degrees = scenario.sizes, scenario.degrees
        moe = {
            "experts": sizes.experts,
            "top_k": sizes.top_k,
            "score": "sigmoid" if sizes.score == "sigmoid" else "softmax_topk",
            "aux_loss": sizes.aux_loss,
            "bias_rate": sizes.bias_rate,
            "capacity_factor": sizes.capacity,
            "dispatcher": cls.dispatcher,
        }
        return {
            "run": {"device": "cpu", "compile": "none", "steps": 100, "dir": directory},
            "model": {
                "layers": sizes.layers,
                "hidden": sizes.hidden,
                "heads": sizes.heads,
                "kv_heads": sizes.kv_heads,
                "ffn_hidden": sizes.ffn,
                "vocab": sizes.vocab,
                "moe": moe,
            },
            "data": {
                "sequence": max(scenario.lengths),
                "documents": "isolate" if scenario.documents else "join",
            },
            "batch": {"micro": 1, "global": scenario.microbatches},
            "parallel": {
                "data": degrees.data,
                "tensor": degrees.tensor,
                "sequence": degrees.sequence,
                "pipeline": degrees.pipeline,
                "expert": degrees.expert,
                "zero": degrees.zero,
                "bucket_mb": 0.004,
            },
            "precision": {"dtype": {"float64": "fp64", "bfloat16": "bf16"}[scenario.dtype]},
            "memory": {"recompute": "full" if scenario.recompute else "none"},
            "optimizer": {
                "lr": scenario.lr,
                "betas": list(scenario.betas),
                "eps": scenario.eps,
                "weight_decay": scenario.decay,
                "clip": scenario.clip,
            },
            "lr_schedule": {"kind": "constant", "warmup": 0, "min_lr": 0.0},
            "checkpoint": {"asynchronous": False},
        }

    def set_weights(self, weights: Tensors) -> None:
        """See the base class."""
        for chunk in self.engine.weights():
            rectangle = chunk.rectangle
            whole = self._global(weights, rectangle.name.removeprefix("model."))
            chunk.tensor.copy_(torch.from_numpy(whole)[rectangle.slices])
        self.engine.publish()

    @staticmethod
    def _global(weights: Tensors, name: str) -> Any:
        canonical = _canonical(name)
        if canonical in weights:
            return weights[canonical]
        layer = canonical.removesuffix("ffn.experts.gate_up")
        return np.stack([weights[f"{layer}experts.{part}"] for part in ("gate", "up")], 1)

    def step(self, batch: Sequence[Sample]) -> Outcome:
        """See the base class."""
        axis = self.mesh.data
        result = self.engine.train_step([_microbatch(sample) for sample in batch[axis.rank :: axis.size]])
        loads = {layer: list(map(float, load.tokens)) for layer, load in result.experts.items()}
        auxiliary = result.auxiliary.get("balance", 0.0)
        return Outcome(result.loss, auxiliary, result.grad_norm, loads)

    def gradients(self) -> list[Piece]:
        """See the base class."""
        return [
            piece
            for bucket in self.engine.trained
            for rectangle, values in bucket.pieces(bucket.gradient)
            for piece in _pieces(rectangle, values)
        ]

    def weights(self) -> list[Piece]:
        """See the base class."""
        return [piece for chunk in self.engine.weights() for piece in _pieces(chunk.rectangle, chunk.tensor)]

    def save(self, directory: str) -> None:
        """See the base class."""
        checkpointer = Checkpointer(load_config(self._tree(self.scenario, directory)), self.mesh)
        checkpointer.save(self.engine.chunks(), self.engine.progress(), last=True)
        checkpointer.close()

    def load(self, directory: str) -> None:
        """See the base class."""
        checkpointer = Checkpointer(load_config(self._tree(self.scenario, directory)), self.mesh)
        path = Path(directory) / "checkpoints" / "step-00000001"
        self.engine.restored(checkpointer.load(path, self.engine.chunks()).progress)
        checkpointer.close()

    def mixtures(self) -> list[Any]:
        """See the base class."""
        modules = (module for stage in self.engine.stages.values() for module in stage.modules())
        return [module for module in modules if isinstance(module, MixtureOfExperts)]


def _microbatch(sample: Sample) -> Microbatch:
    documents = sample.documents if len(sample.documents) > 2 else None
    return Microbatch(
        torch.from_numpy(sample.tokens[None].copy()), torch.from_numpy(sample.labels[None].copy()), documents
    )


def _pieces(rectangle: Rectangle, values: torch.Tensor) -> Iterator[Piece]:
    array, name = values.detach().double().numpy().copy(), rectangle.name.removeprefix("model.")
    layer = name.removesuffix("ffn.experts.gate_up")
    if layer == name:
        yield Piece(_canonical(name), rectangle.offset, array)
        return
    first, part, *rest = rectangle.offset
    for number in range(array.shape[1]):
        kind = ("gate", "up")[part + number]
        yield Piece(f"{layer}experts.{kind}", (first, *rest), array[:, number])
