"""From a launch line of Megatron-LM to Hexad's settings. No torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hexad.config import ConfigError

from .arguments import Line, parse
from .checkpoint import DEFAULT_DIRECTORY, checkpoint_settings
from .data import data_settings
from .deepspeed_file import merge_file
from .derive import derive
from .files import Gpt2Tokenizer, MockData
from .layout import layout_settings
from .model import model_settings
from .training import schedule_settings


@dataclass(frozen=True)
class Translation:
    """What a launch line means.

    Attributes:
        tree: the settings that it determines, by group, as a ``run.yaml`` has them.
        notes: what the user should know: flags without effect, numbers that were rounded.
        files: what must be written before the run starts.
    """

    tree: dict[str, dict[str, Any]]
    notes: tuple[str, ...]
    files: tuple[MockData | Gpt2Tokenizer, ...] = ()

    def yaml(self) -> str:
        """The ``run.yaml``, with the notes as comments."""
        head = ["Translated from a launch line of Megatron-LM by hexad megatron.", *self.notes]
        lines = [f"# {line}" for line in head]
        for group, settings in self.tree.items():
            lines += ["", f"{group}:", *(f"  {name}: {_flow(value)}" for name, value in settings.items())]
        return "\n".join(lines) + "\n"

    def write_files(self, *kinds: str) -> None:
        """Write what the run reads and the line only describes; of some kinds only, if any are named.

        Raises:
            HexadError: they cannot be written.
        """
        for each in self.files:
            if not kinds or each.kind in kinds:
                try:
                    each.write()
                except OSError as error:
                    problem = f"{each.kind} cannot be written to {self.tree['run']['dir']}: {error.strerror}"
                    raise ConfigError("--save", f"{problem}; name another directory") from None


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()


def translate(words: Sequence[str], world: int | None = None, others: Sequence[str] = ()) -> Translation:
    """Translate a launch line.

    Args:
        words: the flags of ``pretrain_gpt.py`` and their values.
        world: number of ranks; None: as few as the degrees allow.
        others: options of the command itself, which an unknown flag may mean.

    Raises:
        ConfigError: a flag that is not known, malformed, or that Hexad cannot honour.
    """
    line = parse(words, others=others)
    derive(line.arguments, world)
    return translated(line)


def translated(line: Line, script: bool = False) -> Translation:
    """As :func:`translate`, of a completed namespace; that of a script may name no data.

    Raises:
        ConfigError: as there.
    """
    arguments = line.arguments
    notes = list(line.notes)
    directory = arguments.save or DEFAULT_DIRECTORY
    schedule, rounded = schedule_settings(arguments)
    notes += rounded
    data = data_settings(arguments, directory, need_data=not script)
    notes += data.notes
    model = model_settings(arguments)
    if data.vocab is not None:
        model["vocab"] = data.vocab
    checkpoint, weights, begun = checkpoint_settings(arguments)
    notes += begun
    if weights is not None:
        model["load"] = weights
    validated = "validation" in data.settings or data.settings.get("split", (0, 0))[1]
    tree = {
        "run": _run(arguments, directory),
        "model": model,
        "data": data.settings,
        "batch": {"micro": arguments.micro_batch_size, "global": arguments.global_batch_size},
        **layout_settings(arguments),
        "precision": _precision(arguments),
        "optimizer": _optimizer(arguments),
        "lr_schedule": schedule,
        "checkpoint": checkpoint,
        "log": _log(arguments),
        "validate": {
            "every": arguments.eval_interval if validated and arguments.eval_iters else 0,
            "batches": max(arguments.eval_iters, 1),
        },
    }
    notes += merge_file(tree, line, script)
    return Translation(tree, tuple(notes), data.files)


def _run(arguments: Namespace, directory: str) -> dict[str, Any]:
    found = {
        "dir": directory,
        "seed": arguments.seed,
        "steps": arguments.train_iters,
        "timeout": 60.0 * arguments.distributed_timeout_minutes,
    }
    if arguments.distributed_backend == "gloo":
        found["device"] = "cpu"
    if arguments.deterministic_mode:
        found["deterministic"] = True
    return found


def _optimizer(arguments: Namespace) -> dict[str, Any]:
    if arguments.optimizer != "adam":
        raise ConfigError("--optimizer", f"found {arguments.optimizer}; Hexad has AdamW: use adam")
    if arguments.lr is None:
        raise ConfigError("--lr", "is missing; give it")
    return {
        "name": "adamw",
        "lr": arguments.lr,
        "betas": [arguments.adam_beta1, arguments.adam_beta2],
        "eps": arguments.adam_eps,
        "weight_decay": arguments.weight_decay,
        "clip": arguments.clip_grad,
    }


def _precision(arguments: Namespace) -> dict[str, Any]:
    if arguments.grad_reduce_in_bf16 and not arguments.bf16:
        raise ConfigError("--grad-reduce-in-bf16", "found without --bf16; add that, or leave it out")
    if not arguments.fp16:
        found = {"dtype": "bf16" if arguments.bf16 else "fp32"}
        return found | ({"reduce": "bf16", "accumulate": "bf16"} if arguments.grad_reduce_in_bf16 else {})
    if arguments.loss_scale:
        return {"dtype": "fp16", "loss_scale": arguments.loss_scale}
    return {
        "dtype": "fp16",
        "loss_scale": "dynamic",
        "loss_scale_initial": arguments.initial_loss_scale,
        "loss_scale_window": int(arguments.loss_scale_window),
        "loss_scale_hysteresis": arguments.hysteresis,
        "loss_scale_min": arguments.min_loss_scale,
    }


def _log(arguments: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"every": arguments.log_interval}
    if arguments.tensorboard_dir:
        found["tensorboard"] = True
    if arguments.wandb_project:
        found["wandb"] = arguments.wandb_project
    if arguments.profile:
        first, end = arguments.profile_step_start, arguments.profile_step_end
        if end <= first:
            raise ConfigError(
                "--profile-step-end", f"found {end}, expected more than --profile-step-start {first}"
            )
        found["profile"] = {"start": first + 1, "steps": end - first}
    return found
