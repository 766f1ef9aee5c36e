"""DeepSpeed's own unit tests against the interface of DeepSpeed, on CPUs.

Needs the ``deepspeed`` package, pytest, and a checkout of DeepSpeed's repository for its ``tests`` directory:

    git clone https://github.com/deepspeedai/DeepSpeed && git -C DeepSpeed checkout edaa722
    python benchmarks/deepspeed_tests.py --source DeepSpeed --output benchmarks/results/deepspeed_tests.json

The tests import the package. Before they do, the names of the interface replace the names in the package's
modules (:func:`replace_names`), except ``init_distributed`` and the accelerator, which the tests' harness
needs. Some private attributes that the tests read are mapped to what the interface has (:func:`adapt`).

A file is collected in one process, which forks another one for each test; ranks are forked too, so that
nothing is imported twice. A test fails as soon as one of its ranks does, since the harness would wait for
the other ranks, or after ``--timeout`` seconds. Failing tests are repeated with the unchanged package: some
fail there too, on a CPU.

Every failure is looked up in :data:`REASONS` by the test and by its error. ``internal``: the test reads what
is no public name of DeepSpeed, or expects the exception type or the text of one of its errors where the
interface raises ``HexadError``. ``refused``: docs/deepspeed.md says that it is not supported. ``differs``: a
difference of the interface. Failures without an entry are reported as ``unexplained``.
"""

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Iterable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from facts import facts
from forked_tests import OneProcessEach, commit_of, explain, kind_of, report_rank, reported, short, summary

FILES: dict[str, int | None] = {
    "launcher/test_ds_arguments.py": None,
    "runtime/test_lr_schedulers.py": None,
    "runtime/test_ds_config_dict.py": None,
    "runtime/test_ds_config_model.py": None,
    "runtime/test_ds_initialize.py": None,
    "runtime/test_no_sync_ctxt.py": None,
    "runtime/test_data.py": None,
    "runtime/test_multi_output_model.py": None,
    "runtime/test_multiple_models.py": 30,
    "runtime/half_precision/test_dynamic_loss_scale.py": None,
    "runtime/half_precision/test_fp16.py": None,
    "v1/half_precision/test_bf16.py": None,
    "v1/half_precision/test_gradient_clipping_default.py": None,
    "runtime/activation_checkpointing/test_activation_checkpointing.py": None,
    "runtime/activation_checkpointing/test_activation_checkpointing_non_reentrant.py": None,
    "pipe/test_pipe_module.py": None,
    "runtime/pipe/test_pipe.py": None,
    "runtime/zero/test_zero_context.py": None,
    "runtime/zero/test_zero_grad_clip.py": None,
    "runtime/zero/test_ignore_unused_parameters.py": None,
    "checkpoint/test_latest_checkpoint.py": None,
    "checkpoint/test_tag_validation.py": None,
    "checkpoint/test_lr_scheduler.py": None,
    "checkpoint/test_other_optimizer.py": None,
    "checkpoint/test_shared_weights.py": None,
    "checkpoint/test_zero_optimizer.py": None,
    "checkpoint/test_pipeline.py": None,
}
"""Files of ``tests/unit`` -> the most tests to run of a file, evenly spaced; None for all."""

OTHER_ERROR = "expects DeepSpeed's exception type; the interface raises HexadError for the same mistake"
PRIVATE = "reads a private attribute, method or class of the package"
LAYOUT = "reads DeepSpeed's own checkpoint files"

REASONS: tuple[tuple[str, str, str, str], ...] = (
    # Found by the error alone
    (
        r"",
        r"(has no attribute|and its module have no) '(_|is_checkpointable|sparse_)",
        "internal",
        PRIVATE,
    ),
    (r"", r"'ThroughputTimer' object has no attribute", "internal", PRIVATE),
    (r"test_zero_grad_clip|TestBf16ZeRO0Unfused", r"isinstance\(EngineOptimizer", "internal", PRIVATE),
    (r"MiCS", r"MiCS_Init", "refused", "MiCS is not part of the interface"),
    (r"TestFP16OptimizerForMoE", r"AttributeError: EngineOptimizer", "internal", PRIVATE),
    (r"test_no_sync_ctxt", r"HexadError: (no_sync|step): found", "internal", OTHER_ERROR),
    (r"test_ds_config_dict.*allreduce_op", r"ConfigError: gradient_allreduce_op", "internal", OTHER_ERROR),
    (r"test_ds_config_dict.*TestNoModel", r"HexadError: initialize", "internal", OTHER_ERROR),
    (r"test_config_duplicate_key", r"HexadError", "internal", OTHER_ERROR),
    (r"test_tag_validation", r"AgreedError|ConfigError|HexadError: save_ch", "internal", OTHER_ERROR),
    (r"TestZeroAllowUntestedOptimizer", r"ConfigError: zero_optimization", "internal", OTHER_ERROR),
    (r"TestClientLrScheduler", r"HexadError: lr_scheduler", "internal", OTHER_ERROR),
    (r"rejects_zenflow", r"zenflow: found it enabled", "refused", "ZenFlow"),
    (r"quantized_eigenvalue|compression_training", r"is not supported", "refused", "compression"),
    (r"test_checkpoint_shared_weights|frozen_weights", r"FileNotFound", "differs", LAYOUT),
    (r"", r"torch.cpu' has no|Invalid device string|device_ids and output", "gpu", "the test needs a GPU"),
    (r"", r"fixture|line \d+ / def", "harness", "its fixture is not found by this release of pytest"),
    # Differences
    (
        r"elastic_checkpoint_is_deprecated",
        r"assert False",
        "differs",
        "keys without effect are named by initialize, not by the class of their section",
    ),
    (
        r"sum_gradient_allreduce_rejects",
        r"DID NOT RAISE",
        "differs",
        "gradient_allreduce_op: sum is accepted with ZeRO 3, and the sections beside it are ignored",
    ),
    (
        r"test_zero_context",
        r"0-sized|is_initialized|no attribute 'ds_(status|tensor)'",
        "differs",
        "zero.Init neither shards parameters nor joins the process group; initialize does",
    ),
    (
        r"contiguous_checkpointing_requires",
        r"DID NOT RAISE",
        "differs",
        "contiguous_memory_optimization has no effect, and needs no number_checkpoints",
    ),
    (
        r"TestClientOptimizer|TestConfigOptimizer",
        r"EngineOptimizer|isinstance\(\) arg 2",
        "differs",
        "initialize returns a wrapper around the optimizer, also in stage 0; FusedAdam is a function",
    ),
    (
        r"TestOptimizerImplementation",
        r"DID NOT RAISE NotImpl",
        "differs",
        "accepted, where DeepSpeed has no optimizer for this grad_accum_dtype: gradients are kept in float32",
    ),
    (
        r"cpu_adam_must_enable_bf16_states",
        r"DID NOT RAISE",
        "differs",
        "bf16_optimizer_states has no effect: optimizer state is float32",
    ),
    (
        r"TestStage2IgnoreUnusedParameters",
        r"DID NOT RAISE",
        "differs",
        "ignore_unused_parameters: false has no effect; parameters without a gradient are always allowed",
    ),
)
"""Pattern of the test's name, pattern of its error, kind, reason."""

PACKAGES_OWN = ("accelerator", "comm")
"""Modules of the package that the harness needs."""


# In the process of a file


def replace_names() -> None:
    """Put the interface's names into the modules of the package."""
    import deepspeed

    from hexad.compat import deepspeed as interface
    from hexad.compat.deepspeed.installed import WHERE

    for theirs, ours in WHERE.items():
        if theirs in PACKAGES_OWN:
            continue
        try:
            target: Any = import_module(f"deepspeed.{theirs}")
        except ModuleNotFoundError:
            target = getattr(deepspeed, theirs)
        source = import_module(f"{interface.__name__}.{ours}")
        for name, value in vars(source).items():
            if not name.startswith("_") and hasattr(target, name) and _of_interface(value):
                setattr(target, name, value)
    for name in interface._PUBLIC:
        if name != "init_distributed":
            setattr(deepspeed, name, getattr(interface, name))


def adapt() -> None:
    """Map private attributes that tests read to what the interface has, and let tests run that skip CPUs.

    Comparisons of checkpoints compare ``module_state_dict()``, the optimizer's master values and its state.
    Unknown keys, some of them misspelt, are warned about (``strict=False``). The accelerator accepts fp16,
    which PyTorch computes on every CPU; the package refuses it where the processor has no units for it.
    """
    import deepspeed
    import pytest
    import torch
    import unit.checkpoint.common as common
    import unit.util as util
    from deepspeed.accelerator import get_accelerator

    from hexad.compat import deepspeed as interface
    from hexad.compat.deepspeed.config import batch_sizes
    from hexad.compat.facade.optimizer import EngineOptimizer
    from hexad.config import HexadError

    get_accelerator().is_fp16_supported = lambda: True

    class Config(interface.DeepSpeedConfig):  # type: ignore[misc]
        def _configure_train_batch_size(self) -> None:
            names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
            keys = self.keys.model_copy(update={name: getattr(self, name) for name in names})
            try:
                sizes = batch_sizes(keys, torch.distributed.get_world_size())
            except HexadError as error:
                raise AssertionError(error) from None
            for name, value in zip(names, (sizes.total, sizes.micro, sizes.accumulation)):
                setattr(self, name, value)

        def __setattr__(self, name: str, value: Any) -> None:
            self.__dict__[name] = value

    def loss_scale_config(self: Any) -> Any:
        scaler = self._engine.scaler
        kept = {"dynamic_loss_scale": self._engine.config.precision.loss_scale == "dynamic"}
        kept |= {"cur_scale": scaler.scale, "scale_window": self._engine.config.precision.loss_scale_window}
        return SimpleNamespace(**kept, cur_iter=self._engine.step)

    def tensors(engine: Any) -> dict[str, torch.Tensor]:
        if isinstance(engine, interface.PipelineEngine):
            return {name: value.detach() for name, value in engine.module.named_parameters()}
        return dict(engine.module_state_dict())

    def compare(
        saved: Any, loaded: Any, compare_optimizer: bool = True, load_module_only: bool = False
    ) -> None:
        if not load_module_only:
            assert saved.skipped_steps == loaded.skipped_steps
            assert saved.global_steps == loaded.global_steps
        one, other = tensors(saved), tensors(loaded)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), "weights are not equal"
        if compare_optimizer:
            pairs = zip(saved.optimizer.param_groups, loaded.optimizer.param_groups)
            masters = [zip(left["params"], right["params"]) for left, right in pairs]
            assert all(torch.equal(a, b) for master in masters for a, b in master), (
                "master values are not equal"
            )

    deepspeed.initialize = partial(interface.initialize, strict=False)
    deepspeed.DeepSpeedConfig = import_module("deepspeed.runtime.config").DeepSpeedConfig = Config
    EngineOptimizer.loss_scale_config = property(loss_scale_config)
    EngineOptimizer.dynamic_loss_scale = property(lambda self: self.loss_scale_config.dynamic_loss_scale)
    EngineOptimizer.loss_scaler = property(lambda self: self)
    interface.DeepSpeedEngine._get_optimizer_ckpt_name = lambda self: ""
    interface.DeepSpeedEngine._backward_epilogue = lambda self: None  # after a loss of several engines
    common.compare_model_states = compare
    for name in ("fused_adam", "cpu_adam"):
        deepspeed.ops.__compatible_ops__[name] = True  # no kernels are compiled
    util.bf16_required_version_check = lambda *_: True  # asks for CUDA
    skip = pytest.skip
    pytest.skip = lambda reason="", **more: (
        None if reason.lower().startswith("cpu accelerator does not support") else skip(reason, **more)
    )


def _of_interface(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith(("hexad.compat.deepspeed", "hexad.compat.facade"))


def chosen(most: int | None, only: set[str], items: list[Any]) -> list[Any]:
    """Tests named, or at most so many, evenly spaced."""
    if only:
        return [item for item in items if item.nodeid in only]
    if most is None or len(items) <= most:
        return items
    return [items[number * len(items) // most] for number in range(most)]


def report_ranks() -> None:
    """Have the harness report a rank's error at once, and fork its ranks."""
    import torch.multiprocessing as processes
    from _pytest.outcomes import Skipped
    from unit.common import DistributedExec

    processes.set_start_method("fork", force=True)
    processes.set_start_method = lambda *_, **__: None
    run = DistributedExec._dist_run

    @wraps(run)  # its name is what is sent to the ranks
    def reporting(self: Any, local_rank: int, *rest: Any) -> Any:
        try:
            return run(self, local_rank, *rest)
        except Skipped:
            raise
        except BaseException as error:
            said = str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
            text = short(f"{type(error).__name__}: {said}")
            report_rank(str(local_rank), text)
            raise RuntimeError(text) from None  # which can be pickled

    DistributedExec._dist_run = reporting


def serve(options: argparse.Namespace) -> None:
    """Run one file's tests."""
    import pytest

    # It is compiled, by a rank that may be killed meanwhile; gloo is used without.
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    sys.path.insert(0, str(Path.cwd()))
    if options.program == "interface":
        replace_names()
        adapt()
    report_ranks()
    with tempfile.TemporaryDirectory() as directory:
        plugin = OneProcessEach(partial(chosen, options.most, set(options.only)), options.timeout)
        arguments = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "--basetemp", f"{directory}/tests"]
        pytest.main([f"unit/{options.serve}", *arguments], plugins=[plugin])


# The process that writes the results


def run_file(
    options: argparse.Namespace, file: str, program: str, only: Iterable[str] = ()
) -> tuple[int, list[dict[str, Any]]]:
    """Tests in a file, and a result for each that was run."""
    command = [
        sys.executable,
        __file__,
        "--serve",
        file,
        "--program",
        program,
        "--timeout",
        str(options.timeout),
    ]
    most = options.most if options.most is not None else FILES.get(file)
    command += ["--most", str(most)] if most is not None else []
    command += ["--only", *only] if only else []
    tests = (options.source / "tests").resolve()
    collected, outcomes = 0, []
    for result in reported(command, tests, {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "8"}):
        if "collected" in result:
            collected = result["collected"]
            continue
        outcomes.append(result | {"test": result["test"].removeprefix("unit/")})
        print(f"{program} {outcomes[-1]['test']}: {result['outcome']} {result['error']}", flush=True)
    return collected, outcomes


def main() -> None:
    """Run the files, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkout of DeepSpeed's repository")
    parser.add_argument("--files", nargs="+", default=list(FILES), help="of tests/unit")
    parser.add_argument("--most", type=int, help="the most tests of a file")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a test")
    parser.add_argument("--only-interface", action="store_true", help="do not run failures with the package")
    parser.add_argument("--output", type=Path, help="results; those of other files in it are kept")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--program", default="interface", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    if options.source is None:
        parser.error("--source: found none; give a checkout of https://github.com/deepspeedai/DeepSpeed")
    version = (options.source / "version.txt").read_text(encoding="utf-8").strip()
    source = f"{version}, commit {commit_of(options.source)}"
    rows: dict[str, Any] = {}
    if options.output and options.output.exists():
        rows = json.loads(options.output.read_text(encoding="utf-8"))["files"]
    for file in options.files:
        collected, results = run_file(options, file, "interface")
        failed = [f"unit/{result['test']}" for result in results if result["outcome"] == "failed"]
        if failed and not options.only_interface:
            package = {result["test"]: result for result in run_file(options, file, "package", failed)[1]}
            for result in results:
                if result["test"] in package:
                    result["package"] = package[result["test"]]["outcome"]
        rows[file] = {"collected": collected, "run": len(results), "tests": results}
        for row in rows.values():
            for outcome in row["tests"]:
                explain(outcome, REASONS)
        if options.output:
            document = facts() | {"source": source, "summary": {}, "files": rows}
            document["summary"] = summary(result for row in rows.values() for result in row["tests"])
            options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    everything = [result for row in rows.values() for result in row["tests"]]
    for file, row in rows.items():
        print(f"| {file} | {row['collected']} | {row['run']} | {summary(row['tests'])} |")
    print(summary(everything))
    for outcome in everything:
        if kind_of(outcome) == "unexplained":
            print("unexplained:", outcome["test"], outcome["error"])


if __name__ == "__main__":
    main()
