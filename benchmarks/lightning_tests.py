"""Lightning's own tests of DDPStrategy against HexadStrategy, on CPUs.

Needs pytest, and a checkout of Lightning's repository for its ``tests`` directory:

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    pip install pytest cloudpickle scikit-learn 'jsonargparse[signatures]'
    python benchmarks/lightning_tests.py --source pytorch-lightning --output lightning_tests.json

All tests in :data:`FILES` are run with Lightning's own strategies first. Those that pass and have made a
``DDPStrategy`` in their first process are repeated with :class:`DDPStrategy` of this file in its place, which
is a ``HexadStrategy``: under its name in Lightning's modules, and as ``strategy="ddp"``, ``"ddp_spawn"``,
``"ddp_fork"`` and their variants. Tests that Lightning runs one by one (``standalone``) are included. Ranks
are started as the tests say: by the script, spawned or forked. FSDPStrategy's tests need GPUs.

A test fails as soon as one of its ranks does, or after ``--timeout`` seconds. Every failure is looked up in
:data:`REASONS` by the test and by its error. ``internal``: the test reads what is no public name of Lightning
or checks how DDP is called. ``refused``: docs/lightning.md says that it is not supported. ``differs``: a
difference of the strategy. Failures without an entry are reported as ``unexplained``.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch.strategies as strategies
from facts import facts
from forked_tests import (
    OneProcessEach,
    commit_of,
    explain,
    kind_of,
    outcome_of,
    report_rank,
    reported,
    summary,
)

from hexad.compat.lightning import HexadStrategy

FILES = (
    "test_cli.py",
    *(
        f"{folder}/test_{name}.py"
        for folder, names in {
            "accelerators": "common",
            "callbacks": "early_stopping pruning spike stochastic_weight_avg weight_averaging",
            "callbacks/progress": "tqdm_progress_bar",
            "checkpointing": "checkpoint_callback_frequency model_checkpoint torch_saving",
            "core": "metric_result_integration results",
            "deprecated_api": "no_removal_version",
            "loggers": "all",
            "loops": "prediction_loop",
            "models": "amp cpu ddp_fork_amp hooks restore",
            "overrides": "distributed",
            "plugins": "amp_plugins cluster_integration",
            "plugins/precision": "double",
            "profilers": "profiler",
            "serve": "servable_module_validator",
            "strategies": "common custom_strategy ddp ddp_integration ddp_integration_comm_hook registry",
            "strategies/launchers": "multiprocessing subprocess_script",
            "trainer": "dataloaders ddp_sigterm_handling trainer",
            "trainer/connectors": "accelerator_connector data_connector",
            "trainer/flags": "overfit_batches",
            "trainer/logging_": "distributed_logging train_loop_logging",
            "trainer/optimization": "manual_optimization optimizers",
            "trainer/properties": "estimated_stepping_batches get_model",
            "tuner": "lr_finder scale_batch_size tuning",
            "utilities": "all_gather_grad combined_loader compile dtype_device_mixin",
        }.items()
        for name in names.split()
    ),
)
"""Files of ``tests/tests_pytorch`` that name DDP."""

MOST = {"callbacks/test_spike.py": 4}
"""Files -> the most tests to repeat of a file that varies one test, evenly spaced."""

REASONS: tuple[tuple[str, str, str, str], ...] = (
    ("test_ddp_kwargs_from_registry", r"assert \{\}", "internal", "reads the arguments of DDP's constructor"),
    (
        "test_ddp_configure_ddp",
        "DistributedDataParallel",
        "internal",
        "expects the module in a `DistributedDataParallel`",
    ),
    ("", r"checkpoint_io'|CheckpointIO, but", "refused", "a `CheckpointIO` plugin"),
    ("", r"found ModelPruning", "refused", "`ModelPruning`"),
    ("test_ema_", "keeps a second model|Expected regex: 'CRASH'", "refused", "`WeightAveraging`"),
    (
        "no_extraneous_invocations",
        "AssertionError",
        "internal",
        "counts calls of `torch.save`, which every rank makes",
    ),
    (
        "test_cli",
        "find_unused_parameters' is not accepted",
        "differs",
        "`find_unused_parameters` is no argument; unused parameters need none",
    ),
    ("", "IsADirectoryError", "differs", "loads a checkpoint's path itself; `checkpoint_file` makes a file"),
    (
        "find_unused_parameters",
        "DID NOT RAISE",
        "differs",
        "expects an error for unused parameters, which are allowed",
    ),
)
"""Pattern of the test's name, pattern of its error, kind, reason."""

PROGRAM = "HEXAD_TESTS_OF"
"""Variable of the environment: ``lightning`` or ``hexad``."""

TESTS = "tests/tests_pytorch/"

WITHOUT_EFFECT = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
"""Arguments of DDPStrategy that HexadStrategy needs no counterpart of."""


class DDPStrategy(HexadStrategy):
    """HexadStrategy in the place of Lightning's, whose name some tests compare."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(
            **dict(zip(("accelerator", "parallel_devices", "cluster_environment"), positional)),
            **{name: value for name, value in named.items() if name not in WITHOUT_EFFECT},
        )


# In the process of the tests


def replace_names() -> None:
    """Put :class:`DDPStrategy` in the place of Lightning's."""
    theirs = strategies.DDPStrategy
    for entry in strategies.StrategyRegistry.values():
        if entry["strategy"] is theirs:
            entry["strategy"] = DDPStrategy
    strategies.DDPStrategy = strategies.ddp.DDPStrategy = DDPStrategy  # type: ignore[misc]


def note_use() -> None:
    """Write a file when a test makes one of Lightning's DDPStrategy."""
    initialise = strategies.DDPStrategy.__init__

    @wraps(initialise)
    def noting(self: Any, *args: Any, **options: Any) -> None:
        if "HEXAD_REPORTS" in os.environ:
            Path(os.environ["HEXAD_REPORTS"], "used").touch()
        initialise(self, *args, **options)

    strategies.DDPStrategy.__init__ = noting  # type: ignore[method-assign]


class Tests(OneProcessEach):
    """Tests of this process, those chosen; with whether they have made a DDPStrategy."""

    def __init__(self, only: Iterable[str], timeout: float) -> None:
        self.only = set(only)
        super().__init__(
            lambda items: [item for item in items if not self.only or item.nodeid in self.only], timeout
        )

    def _run(self, item: Any, folder: Path) -> None:
        # The command of other ranks, which DDPStrategy starts.
        sys.argv = [__file__, "--serve", item.nodeid, "--files", str(item.path)]
        if "DDPStrategy object" in repr(getattr(item, "callspec", None)):
            (folder / "used").touch()
        super()._run(item, folder)

    def _wait(self, child: int, folder: Path) -> dict[str, Any]:
        return super()._wait(child, folder) | {"used": (folder / "used").exists()}


class OtherRank:
    """A plugin of pytest that runs a test in a rank that the test has started."""

    def __init__(self, test: str) -> None:
        self.test = test

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Choose the test."""
        items[:] = [item for item in items if item.nodeid == self.test]

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        """Run it, and report an error."""
        outcome = outcome_of(item)
        if outcome["outcome"] == "failed":
            report_rank(os.environ["LOCAL_RANK"], outcome["error"])
        return True


def serve(options: argparse.Namespace) -> None:
    """Run tests, or the one of which this is a rank."""
    import pytest

    if os.environ[PROGRAM] == "hexad":
        replace_names()
    else:
        note_use()
    arguments = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    arguments += ["-W", "ignore:torch.distributed.nn.functional:FutureWarning"]  # of later releases of torch
    if "LOCAL_RANK" in os.environ:
        pytest.main([*options.files, *arguments], plugins=[OtherRank(options.serve)])
        return
    only = json.loads(Path(options.only).read_text(encoding="utf-8")) if options.only else []
    pytest.main([*options.files, *arguments], plugins=[Tests(only, options.timeout)])


# The process that writes the results


def run_tests(
    options: argparse.Namespace, program: str, files: Iterable[str], only: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """The result of each test, those included that Lightning runs one by one."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        names = Path(directory, "only.json")
        names.write_text(json.dumps(list(only)), encoding="utf-8")
        for alone in "0", "1":
            command = [sys.executable, str(Path(__file__).resolve()), "--serve", "all"]
            command += ["--timeout", str(options.timeout), *(["--only", str(names)] if only else [])]
            environment = {"PL_RUN_STANDALONE_TESTS": alone, "PYTEST_DEBUG_TEMPROOT": directory}
            environment[PROGRAM] = program
            tests = (options.source / TESTS).resolve()
            for result in reported([*command, "--files", *files], tests, environment):
                if "collected" in result or result["error"] == "Requires: [Standalone execution]":
                    continue
                result["test"] = result["test"].removeprefix(TESTS)
                results[result["test"]] = result
                print(f"{program} {result['test']}: {result['outcome']} {result['error']}", flush=True)
    return results


def count_package(results: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Files -> how many tests were left out, and those to repeat."""
    rows: dict[str, dict[str, Any]] = {}
    for result in results:
        row = rows.setdefault(result["test"].partition("::")[0], {"not_runnable": 0, "other": 0, "tests": []})
        if result["outcome"] != "passed":
            row["not_runnable"] += 1
        elif not result["used"]:
            row["other"] += 1
        else:
            row["tests"].append({"test": result["test"]})
    for file, most in MOST.items():
        if file in rows and len(rows[file]["tests"]) > most:
            tests = rows[file]["tests"]
            rows[file]["tests"] = [tests[number * len(tests) // most] for number in range(most)]
    return rows


def main() -> None:
    """Run the files, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", type=Path, help="a checkout of Lightning's repository")
    parser.add_argument("--files", nargs="+", default=list(FILES), help=f"of {TESTS}")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds of a test")
    parser.add_argument("--only-hexad", action="store_true", help="repeat the tests that the output has")
    parser.add_argument("--output", type=Path, help="results; those of other files are kept")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    if options.source is None or options.output is None:
        parser.error("--source and --output: a checkout of Lightning's repository, and the file of results")
    rows: dict[str, Any] = {}
    if options.output.exists():
        rows = json.loads(options.output.read_text(encoding="utf-8"))["files"]
    if not options.only_hexad:
        rows |= count_package(run_tests(options, "lightning", options.files).values())
        write(options, rows)
    repeated = [test["test"] for file in options.files for test in rows[file]["tests"]]
    files = list(dict.fromkeys(test.partition("::")[0] for test in repeated))
    results = run_tests(options, "hexad", files, [TESTS + test for test in repeated])
    for file in files:
        rows[file]["tests"] = [results[test["test"]] for test in rows[file]["tests"]]
    write(options, rows)
    everything = run(rows)
    print(summary(everything))
    for outcome in everything:
        if outcome["outcome"] != "passed":
            print(f"{kind_of(outcome)}: {outcome['test']} {outcome['error']} {outcome.get('reason', '')}")


def run(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of all tests that have been repeated."""
    return [result for row in rows.values() for result in row["tests"] if "outcome" in result]


def write(options: argparse.Namespace, rows: dict[str, Any]) -> None:
    """The results of all files, with reasons."""
    everything = run(rows)
    for result in everything:
        result.pop("used", None)
        explain(result, REASONS)
    counts = summary(everything) | {
        name: sum(row[name] for row in rows.values()) for name in ("not_runnable", "other")
    }
    origin = {name: value for name, value in facts("lightning").items() if name != "command"}  # of some files
    document = origin | {"source": commit_of(options.source), "summary": counts, "files": rows}
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and os.environ.get(PROGRAM) == "hexad":  # a rank that a test has spawned
    replace_names()
