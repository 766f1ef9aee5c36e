"""The file of ``--deepspeed_config``, which Megatron-DeepSpeed's launch lines name. No torch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hexad.config import ConfigError, HexadError

from ..deepspeed.config import Batch, CheckedConfig, given, read_keys, unknown_keys, without_effect
from ..deepspeed.keys import Keys, Offload
from ..deepspeed.translate import settings_beside_optimizer, shared_settings
from ..megatron.arguments import Line
from ..megatron.tables import FLAGS

_EQUAL = {
    "batch.micro": "train_micro_batch_size_per_gpu",
    "batch.global": "train_batch_size",
    "parallel.tensor": "tensor_parallel.autotp_size",
    "parallel.context": "sequence_parallel_size",
}
"""Settings that the flags determine -> the key that must be equal, where the file has it."""

_PRECISION = {
    "loss_scale": "fp16.loss_scale",
    "loss_scale_initial": "fp16.initial_scale_power",
    "loss_scale_window": "fp16.loss_scale_window",
    "loss_scale_hysteresis": "fp16.hysteresis",
    "loss_scale_consecutive": "fp16.consecutive_hysteresis",
    "loss_scale_min": "fp16.min_loss_scale",
    "reduce": "communication_data_type",
    "accumulate": "data_types.grad_accum_dtype",
}
"""Settings of ``precision`` that the file determines where it enables fp16 (by DeepSpeed's defaults where it
lacks the key), or where it or the flags enable bf16."""

_TOGETHER = {"precision.accumulate": "precision.reduce"}
"""A setting without a flag -> one whose flag determines both."""


def merge_file(tree: dict[str, dict[str, Any]], line: Line, script: bool = False) -> list[str]:
    """Add in place what the file of ``--deepspeed_config`` determines and the line does not.

    Args:
        tree: the settings of the flags.
        line: with what :func:`~hexad.compat.megatron.arguments.derive` has added.
        script: the line is a script's, whose ``deepspeed.initialize`` reads the complete file.

    Returns:
        what the user should know; nothing for a script.

    Raises:
        ConfigError: a file that cannot be read or honoured, or that contradicts the flags.
    """
    arguments = line.arguments
    path, used = arguments.deepspeed_config, arguments.deepspeed
    if path is None or not used:
        flags = ("--deepspeed", "--deepspeed_config")
        alone, other = flags if used else flags[::-1]
        return [f"{alone}: no effect without {other}"] if (used or path) and not script else []
    notes: list[str] = []
    with _naming(path):
        keys, content = read_keys(path)
    merge = _Merge(tree, line, path, keys)
    for setting, key in _EQUAL.items():
        merge.equal(setting, key)
    batch = _batch(tree, arguments.data_parallel_size)
    if keys.gradient_accumulation_steps not in (None, batch.accumulation):
        raise ConfigError(
            "--global-batch-size",
            f"found {batch.total}, which is --micro-batch-size {batch.micro} x {batch.accumulation} passes x "
            f"{arguments.data_parallel_size} data ranks, but {path} has gradient_accumulation_steps "
            f"{keys.gradient_accumulation_steps}; make them equal, or change the number of ranks",
        )
    merge.determine("parallel.zero", "zero_optimization.stage", keys.zero_optimization.stage)
    with _naming(path):
        config = CheckedConfig(_with_flags(keys, tree), batch, content)
        settings = shared_settings(config) if script else settings_beside_optimizer(config, notes)
    offload = settings["memory"].get("offload", "none")
    merge.determine("memory.offload", "zero_optimization.offload_optimizer", offload)
    merge.determine("optimizer.clip", "gradient_clipping", keys.gradient_clipping)
    merge.precision(settings["precision"])
    kind = tree["precision"]["dtype"]
    arguments.fp16, arguments.bf16 = kind == "fp16", kind == "bf16"
    arguments.zero_stage, arguments.clip_grad = tree["parallel"]["zero"], tree["optimizer"]["clip"]
    if script:
        return []
    notes += [*_of_flags(keys, kind), *without_effect(keys)]
    notes += [f"{key}: unknown key; no effect" for key in unknown_keys(content)]
    return [f"{path}: {note}" for note in notes]


def _with_flags(keys: Keys, tree: dict[str, dict[str, Any]]) -> Keys:
    """The keys with what the flags determine and other keys depend on."""
    zero = keys.zero_optimization.model_copy(update={"stage": tree["parallel"]["zero"]})  # the hysteresis
    update: dict[str, Any] = {"zero_optimization": zero}
    precision = tree["precision"]
    if precision["dtype"] == "bf16" and not keys.fp16.enabled:
        update["bf16"] = keys.bf16.model_copy(update={"enabled": True})
    if precision.get("reduce") == "bf16" and keys.communication_data_type is None:
        update["communication_data_type"] = "bf16"
    return keys.model_copy(update=update)


def _of_flags(keys: Keys, dtype: str) -> list[str]:
    """A note for each key of the file in whose place a flag has an effect."""
    names = [key for key in ("optimizer", "scheduler", "steps_per_print") if given(keys, key) is not None]
    notes = [f"{name}: no effect: the flags determine it" for name in names]
    if dtype == "fp16" and not keys.fp16.enabled:
        scaler = [key for key in _PRECISION.values() if key.startswith("fp16.")]
        notes += [f"{key}: no effect without fp16.enabled" for key in scaler if given(keys, key) is not None]
    return notes


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the flag and the file in errors of its keys."""
    try:
        yield
    except HexadError as error:
        text = str(error)
        raise ConfigError("--deepspeed_config", text if path in text else f"{path}: {text}") from None


def _batch(tree: dict[str, dict[str, Any]], data_ranks: int) -> Batch:
    micro, total = tree["batch"]["micro"], tree["batch"]["global"]
    if total % (micro * data_ranks):
        raise ConfigError(
            "--global-batch-size",
            f"found {total}, expected a multiple of --micro-batch-size {micro} x {data_ranks} data ranks = "
            f"{micro * data_ranks}; change one of them",
        )
    return Batch(micro, total // (micro * data_ranks), total)


@dataclass(frozen=True)
class _Merge:
    """Settings of the flags, changed in place, and keys of a file, which may not contradict them."""

    tree: dict[str, dict[str, Any]]
    line: Line
    path: str
    keys: Keys

    def equal(self, setting: str, key: str) -> None:
        """Refuse another value of the file than that of the flags."""
        value = self._value(key)
        if value not in (None, 0, self._known(setting)):  # 0: autotp_size off
            flag = next(flag.name for flag in FLAGS.values() if flag.target == setting)
            raise self._contradiction(flag, setting, key, value)

    def determine(self, setting: str, key: str, value: Any) -> None:
        """Set what the file has and no flag; refuse another value than a flag's."""
        if self._value(key) is not None:
            self._set(setting, key, value)

    def precision(self, settings: dict[str, Any]) -> None:
        """Set what the file has of ``precision`` and no flag; refuse other values than the flags'."""
        kinds = ("fp16", "bf16")
        for kind in kinds:
            if self._value(f"{kind}.enabled") is False and self._known("precision.dtype") == kind:
                raise self._contradiction(f"--{kind}", "precision.dtype", f"{kind}.enabled", False)
        if settings["dtype"] in kinds:
            self._set("precision.dtype", f"{settings['dtype']}.enabled", settings["dtype"])
            for name, key in _PRECISION.items():
                setting, value = f"precision.{name}", self._value(key)
                if name in settings:
                    self._set(setting, key, settings[name])
                elif value == "fp32" or (value is not None and self._flags(setting)):
                    self._set(setting, key, value)

    def _set(self, setting: str, key: str, value: Any) -> None:
        written = self._flags(setting)
        if not written:
            group, name = setting.split(".")
            self.tree[group][name] = value
        elif key == "fp16.hysteresis" and self._value(key) == self._known(setting):
            self.tree["precision"][setting.split(".")[1]] = value  # which level 0 does not use
        elif self._value(key) is not None and value != self._known(setting):
            raise self._contradiction(written[0], setting, key, self._value(key))

    def _flags(self, setting: str) -> list[str]:
        """The flags on the line that determine a setting."""
        targets = (setting, _TOGETHER.get(setting))
        flags = [flag for flag in FLAGS.values() if flag.target in targets]
        return [flag.name for flag in flags if flag.attribute in self.line.written]

    def _known(self, setting: str) -> Any:
        group, name = setting.split(".")
        return self.tree[group].get(name)

    def _value(self, key: str) -> Any:
        """The file's value of a key; None if it has none."""
        value = given(self.keys, key)
        return value.device if isinstance(value, Offload) else value

    def _contradiction(self, flag: str, setting: str, key: str, value: Any) -> ConfigError:
        problem = f"found {self._known(setting)} ({setting})"
        return ConfigError(flag, f"{problem}, but {self.path} has {key} {json.dumps(value)}; make them equal")
