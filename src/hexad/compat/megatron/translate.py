"""Translation of a launch line of Megatron-LM into Hexad's settings: architecture, schedule, checkpoints and
the rest. No torch."""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hexad.config import ConfigError

from ..facade.extensions import extension
from .arguments import Line, batch_settings, derive, parse
from .data import Files, data_settings
from .layout import layout_settings
from .tables import flag_of


def model_settings(arguments: Namespace) -> dict[str, Any]:
    """The settings of the group ``model``.

    Raises:
        ConfigError: an architecture that no family has, or experts.
    """
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if (getattr(arguments, name) or 1) > 1:  # as Megatron-LM does
            problem = f"found {getattr(arguments, name)} without --num-experts; leave it out"
            raise ConfigError(flag_of(name), problem)
    settings = {
        "family": _family(arguments),
        "layers": arguments.num_layers,
        "hidden": arguments.hidden_size,
        "heads": arguments.num_attention_heads,
        "kv_heads": arguments.num_query_groups,
        "head_dim": arguments.kv_channels,
        "ffn_hidden": arguments.ffn_hidden_size,
        "max_positions": arguments.max_position_embeddings,
        "tied_embeddings": not arguments.untie_embeddings_and_output_weights,
        "norm_eps": arguments.norm_epsilon,
        "dropout": arguments.hidden_dropout,
        "attention_dropout": arguments.attention_dropout,
        "init_std": arguments.init_method_std,
    }
    settings |= _biases(arguments, settings["family"])
    if settings["family"] != "gpt2":
        settings |= _rotary(arguments)
    if arguments.input_embeddings_multiplier != 1:
        settings["embedding_multiplier"] = arguments.input_embeddings_multiplier
    if arguments.window_size is not None:
        settings["sliding_window"] = _window(arguments.window_size)
    return settings


def _family(arguments: Namespace) -> str:
    """The family of this architecture.

    Megatron-LM combines norms, positions and activations freely; families are the combinations that have a
    name.
    """
    traits = {
        "--normalization": (arguments.normalization, "LayerNorm", "RMSNorm"),
        "--position-embedding-type": (arguments.position_embedding_type, "learned_absolute", "rope"),
        "--swiglu": (arguments.swiglu, False, True),
    }
    if not arguments.add_position_embedding and arguments.position_embedding_type != "rope":
        raise ConfigError("--no-position-embedding", "found without rope; leave it out, or use rope")
    gpt2 = [flag for flag, (value, one, _) in traits.items() if value != one]
    llama = [flag for flag, (value, _, other) in traits.items() if value != other]
    if not gpt2:
        if arguments.qk_layernorm:
            raise ConfigError("--qk-layernorm", "found with LayerNorm; it needs RMSNorm: leave it out")
        return "gpt2"
    if not llama:
        if arguments.qk_layernorm:
            return "qwen3"
        return "qwen2" if arguments.add_qkv_bias and not arguments.add_bias_linear else "llama"
    wrong = gpt2 if len(gpt2) <= len(llama) else llama
    value = traits[wrong[0]][0]
    what = f"found {value}" if isinstance(value, str) else "is set" if value else "is missing"
    raise ConfigError(
        wrong[0],
        f"{what}: the flags fit neither GPT-2 (LayerNorm, learned_absolute, GELU) nor Llama "
        "(--normalization RMSNorm --position-embedding-type rope --swiglu); use all of one of them",
    )


def _biases(arguments: Namespace, family: str) -> dict[str, bool]:
    """The settings of biases, without those of gpt2 that are its default."""
    every = arguments.add_bias_linear
    biases = {
        "qkv_bias": every or arguments.add_qkv_bias,
        "out_bias": every or arguments.add_dense_bias,
        "mlp_bias": every,
    }
    return {name: value for name, value in biases.items() if family != "gpt2" or not value}


def _rotary(arguments: Namespace) -> dict[str, Any]:
    settings = {
        "qk_norm": arguments.qk_layernorm,
        "rope_theta": arguments.rotary_base,
        "rotary_fraction": arguments.rotary_percent,
    }
    scaling = _rope_scaling(arguments)
    return settings | ({} if scaling is None else {"rope_scaling": scaling})


def _rope_scaling(arguments: Namespace) -> dict[str, Any] | None:
    """The settings of ``rope_scaling``; None without it."""
    scalings = {
        "--use-rope-scaling": arguments.use_rope_scaling,
        "--rope-scaling-type": arguments.rope_scaling_type,
        "--rotary-seq-len-interpolation-factor": arguments.rotary_seq_len_interpolation_factor != 1,
    }
    flags = [flag for flag, value in scalings.items() if value]
    if len(flags) > 1:
        raise ConfigError(flags[1], f"found beside {flags[0]}; give one of them")
    if arguments.use_rope_scaling:
        # Megatron-LM has a flag for the factor only.
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
        return {"factor": arguments.rope_scaling_factor, **fixed}
    if arguments.rope_scaling_type == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        low, high, original = (getattr(arguments, name) for name in names)
        for name in names:
            if getattr(arguments, name) is None:
                raise ConfigError(flag_of(name), "is missing with --rope-scaling-type llama3; give it")
        fixed = {"low_freq_factor": low, "high_freq_factor": high, "original_positions": int(original)}
        return {"factor": arguments.rope_scaling_factor, **fixed}
    if flags:
        return {"type": "linear", "factor": arguments.rotary_seq_len_interpolation_factor}
    return None


def _window(text: str) -> int | None:
    """``sliding_window`` of Megatron-LM's (tokens to the left, tokens to the right); -1 is no limit."""
    try:
        left, right = (int(word) for word in text.strip("()").split(","))
    except ValueError:
        left, right = -2, 0
    if left < -1 or right not in (0, -1):
        raise ConfigError("--window-size", f"found {text!r}, expected LEFT,0")
    return None if left == -1 else left + 1


_KINDS = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
    "WSD": "wsd",
}
"""``--lr-decay-style`` -> ``lr_schedule.kind``."""
SHIFT = "learning rate: that of step n is Megatron-LM's of iteration n + 1, whose first update has the rate 0"


def schedule_settings(arguments: Namespace, notes: list[str]) -> dict[str, Any]:
    """The group ``lr_schedule``, in iterations of complete batches; adds notes for the user.

    Raises:
        ConfigError: a shape that Hexad does not have.
    """
    batch = batch_settings(arguments)
    steps, trained = (
        batch.samples(count) / batch.global_ for count in (last_iteration(arguments), arguments.train_iters)
    )
    in_samples = arguments.train_samples is not None
    unit, per_iteration = ("samples", arguments.global_batch_size) if in_samples else ("iters", 1)

    def iterations(name: str) -> float | None:
        """``lr_..._iters``, or ``lr_..._samples``."""
        count = getattr(arguments, f"{name}_{unit}")
        return None if count is None else float(count / per_iteration)

    def rounded(flag: str, number: float) -> int:
        if number != round(number):
            notes.append(f"{flag}: {number:,.2f} iterations, rounded to {round(number):,}")
        return round(number)

    decay_iterations = iterations("lr_decay")
    decay = trained if decay_iterations is None else decay_iterations
    if arguments.lr_warmup_fraction is not None:
        if not 0 <= arguments.lr_warmup_fraction <= 1:
            raise ConfigError(
                "--lr-warmup-fraction", f"found {arguments.lr_warmup_fraction}, expected a number from 0 to 1"
            )
        flag, length = "--lr-warmup-fraction", arguments.lr_warmup_fraction * decay
    else:
        flag, length = f"--lr-warmup-{unit}", iterations("lr_warmup") or 0.0
    if length and length >= decay:
        problem = f"found {length:g} iterations of warm-up, expected less than the {decay:g} of "
        problem += f"--train-{unit}" if decay_iterations is None else f"--lr-decay-{unit}"
        raise ConfigError(flag, f"{problem}; lower it")
    warmup = rounded(flag, length)
    end = rounded(f"--lr-decay-{unit}", decay)
    kind = _KINDS[arguments.lr_decay_style]
    settings: dict[str, Any] = {"kind": kind, "warmup": warmup}
    if warmup:
        notes.append(SHIFT)
    if kind == "constant":
        return settings
    if kind in ("wsd", "inverse_sqrt") and end != round(steps):
        raise ConfigError(
            f"--lr-decay-{unit}",
            f"found {end} of {round(steps)} iterations with {arguments.lr_decay_style}, which Hexad ends "
            "with the run; leave it out",
        )
    if kind == "wsd":
        length = iterations("lr_wsd_decay")
        if length is None:
            raise ConfigError(f"--lr-wsd-decay-{unit}", "is missing with WSD; give it")
        if arguments.lr_wsd_decay_style != "linear":
            problem = f"found {arguments.lr_wsd_decay_style}; Hexad's wsd decays linearly: use linear"
            raise ConfigError("--lr-wsd-decay-style", problem)
        settings["decay_steps"] = rounded(f"--lr-wsd-decay-{unit}", length)
    elif kind != "inverse_sqrt":
        settings["decay_steps"] = end
    if arguments.decoupled_lr is not None and arguments.decoupled_min_lr is not None:
        settings["decoupled_min_lr"] = arguments.decoupled_min_lr
    return {**settings, "min_lr": arguments.min_lr}


DEFAULT_DIRECTORY = "runs/megatron"
"""``run.dir`` without ``--save``."""


def checkpoint_settings(arguments: Namespace, notes: list[str]) -> tuple[dict[str, Any], str | None]:
    """The group ``checkpoint``, and ``model.load``; adds notes for the user.

    As in Megatron-LM, a run resumes only from what ``--load`` names.

    Raises:
        ConfigError: what Hexad cannot load, or flags that exclude each other.
    """
    load, save, weights = arguments.load, arguments.save, arguments.pretrained_checkpoint
    if arguments.enable_hf2mg_convert and load is not None:
        load, weights = None, f"hf:{load}"
    resumes = load is not None and save is not None and Path(load) == Path(save)
    settings: dict[str, Any] = {
        "every": (arguments.save_interval or 0) if save else 0,
        "keep": 10**9,  # Megatron-LM deletes none
        "asynchronous": arguments.async_save,
        "resume": "auto" if resumes else "never",
    }
    if not save:
        notes.append(f"without --save: the last checkpoint, metrics and logs are in {DEFAULT_DIRECTORY}")
    _refuse_foreign("--load", load)
    _refuse_foreign("--pretrained-checkpoint", weights)
    if arguments.finetune and load is not None:
        if resumes:
            raise ConfigError("--finetune", f"found with --load and --save {load}; save to another directory")
        load, weights = None, load
    if load is not None and arguments.no_load_optim and _holds_checkpoints(load):
        raise ConfigError(
            "--no-load-optim",
            f"found with --load {load}, which holds checkpoints; one is resumed completely: leave it out, or "
            "add --finetune to begin with the weights only",
        )
    if resumes and arguments.exit_on_missing_checkpoint:
        settings["resume"] = "must"
    elif load is not None and not resumes:
        if Path(load).is_dir() or arguments.exit_on_missing_checkpoint:
            settings["load"] = load
        else:
            notes.append(f"--load: {load} does not exist: the run begins with initial weights")
    return settings, weights


def refuse_forgotten(directory: str, resume: str) -> None:
    """Refuse to start a new run (``checkpoint.resume`` is never) in a directory with checkpoints.

    Raises:
        ConfigError: naming the flag that resumes.
    """
    if resume == "never" and _holds_checkpoints(directory):
        raise ConfigError(
            "--save",
            f"{directory} holds checkpoints; add --save {directory} --load {directory} to resume, or "
            "save to another directory",
        )


def _holds_checkpoints(directory: str) -> bool:
    """Whether it is a run or a checkpoint of Hexad."""
    return any((Path(directory) / name).exists() for name in ("checkpoints", "manifest.json"))


def _refuse_foreign(flag: str, directory: str | None) -> None:
    """A checkpoint of Megatron-LM is recognised by its tracker file."""
    if directory is not None and (Path(directory) / "latest_checkpointed_iteration.txt").exists():
        raise ConfigError(
            flag,
            f"{directory} holds checkpoints of Megatron-LM; convert one with 'hexad checkpoint import --from "
            f"megatron:{directory} --to DIR --model run.yaml' and name DIR",
        )


@dataclass(frozen=True)
class Translation:
    """A launch line, or a recipe of NeMo, as Hexad's settings.

    Attributes:
        tree: the settings that it determines, by group, as a ``run.yaml`` has them.
        notes: what the user should know: flags without effect, numbers that were rounded.
        files: what must be written before the run starts.
    """

    tree: dict[str, dict[str, Any]]
    notes: tuple[str, ...]
    files: Files

    def yaml(self, source: str = "a launch line of Megatron-LM by hexad megatron") -> str:
        """The ``run.yaml``, with the notes as comments; ``source``: what it is translated from."""
        head = [f"Translated from {source}.", *self.notes]
        lines = [f"# {line}" for line in head]
        for group, settings in self.tree.items():
            lines += ["", f"{group}:", *(f"  {name}: {_flow(value)}" for name, value in settings.items())]
        return "\n".join(lines) + "\n"

    def write_files(self, *kinds: str) -> None:
        """Write what the run reads and the line only describes; of some kinds only, if any are named.

        Raises:
            HexadError: they cannot be written.
        """
        for kind, write in self.files:
            if not kinds or kind in kinds:
                try:
                    write()
                except OSError as error:
                    problem = f"{kind} cannot be written to {self.tree['run']['dir']}: {error.strerror}"
                    raise ConfigError("--save", f"{problem}; name another directory") from None


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()


def translate(
    words: Sequence[str],
    world: int | None = None,
    others: Sequence[str] = (),
    ignore: Iterable[str] = (),
) -> Translation:
    """Translate a launch line.

    Args:
        words: the flags of ``pretrain_gpt.py`` and their values.
        world: number of ranks; None: as few as the degrees allow.
        others: options of the command itself, which an unknown flag may mean.
        ignore: flags to ignore with their values, known or not.

    Raises:
        ConfigError: a flag that is not known, malformed, or that Hexad cannot honour.
    """
    line = parse(words, others=others, ignore=ignore)
    derive(line.arguments, world)
    return translated(line)


def translated(line: Line, script: bool = False) -> Translation:
    """Translate a completed namespace; that of a script may name no data.

    Raises:
        ConfigError: as there.
    """
    arguments = line.arguments
    notes, files = list(line.notes), Files()
    directory = arguments.save or DEFAULT_DIRECTORY
    schedule = schedule_settings(arguments, notes)
    data, vocab = data_settings(arguments, directory, notes, files, need_data=not script)
    model = model_settings(arguments)
    if vocab is not None:
        model["vocab"] = vocab
    checkpoint, weights = checkpoint_settings(arguments, notes)
    if weights is not None:
        model["load"] = weights
    validated = "validation" in data or data.get("split", (0, 0))[1]
    tree = {
        "run": _run(arguments, directory),
        "model": model,
        "data": data,
        "batch": batch_settings(arguments).model_dump(mode="json", exclude_none=True),
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
    notes += extension("flags, with --deepspeed_config")(tree, line, script)
    return Translation(tree, tuple(notes), files)


def last_iteration(arguments: Namespace) -> int:
    """``run.steps``: Megatron-LM exits at multiples of ``--exit-interval``."""
    return min(arguments.train_iters, arguments.exit_interval or arguments.train_iters)


def _run(arguments: Namespace, directory: str) -> dict[str, Any]:
    settings = {
        "dir": directory,
        "seed": arguments.seed,
        "steps": last_iteration(arguments),
        "timeout": 60.0 * arguments.distributed_timeout_minutes,
    }
    if arguments.distributed_backend == "gloo":
        settings["device"] = "cpu"
    if arguments.deterministic_mode:
        settings["deterministic"] = True
    return settings


def _optimizer(arguments: Namespace) -> dict[str, Any]:
    if arguments.optimizer != "adam":
        raise ConfigError("--optimizer", f"found {arguments.optimizer}; Hexad has AdamW: use adam")
    return {
        "name": "adamw",
        "lr": arguments.lr,
        **({} if arguments.decoupled_lr is None else {"decoupled_lr": arguments.decoupled_lr}),
        "betas": [arguments.adam_beta1, arguments.adam_beta2],
        "eps": arguments.adam_eps,
        "weight_decay": arguments.weight_decay,
        "clip": arguments.clip_grad,
    }


def _precision(arguments: Namespace) -> dict[str, Any]:
    if arguments.grad_reduce_in_bf16 and not arguments.bf16:
        raise ConfigError("--grad-reduce-in-bf16", "found without --bf16; add that, or leave it out")
    narrow = {"reduce": "bf16", "accumulate": "bf16"} if arguments.grad_reduce_in_bf16 else {}
    if arguments.fp8 or arguments.fp8_hybrid:
        if arguments.fp8 == "e4m3" or not arguments.bf16:
            problem = "found e4m3" if arguments.fp8 == "e4m3" else "found without --bf16"
            raise ConfigError("--fp8-format", f"{problem}; use hybrid, with --bf16")
        return {"dtype": "fp8", "fp8_weight_gradients": arguments.fp8_wgrad, **narrow}
    if not arguments.fp16:
        return {"dtype": "bf16" if arguments.bf16 else "fp32", **narrow}
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
    settings: dict[str, Any] = {"every": arguments.log_interval}
    if arguments.check_weight_hash_across_dp_replicas_interval is not None:
        settings["check_replicas"] = arguments.check_weight_hash_across_dp_replicas_interval
    if arguments.tensorboard_dir:
        settings["tensorboard"] = True
    if arguments.wandb_project:
        settings["wandb"] = arguments.wandb_project
    if arguments.profile:
        first, end = arguments.profile_step_start, arguments.profile_step_end
        if end <= first:
            raise ConfigError(
                "--profile-step-end", f"found {end}, expected more than --profile-step-start {first}"
            )
        settings["profile"] = {"start": first + 1, "steps": end - first}
    return settings
