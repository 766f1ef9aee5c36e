"""``hexad submit``: the file for each engine, held to what reads it, and wrong options."""

from __future__ import annotations

import ast
import gzip
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..training.command import call

SCHEMAS = Path(__file__).parent / "schemas"
RUN = """\
run: {dir: runs/job, steps: 10}
model: {preset: llama3.2-1b}
data: {train: data/train, tokenizer: byte, sequence: 2048}
batch: {micro: 1, global: 64}
parallel: {tensor: 2}
"""
IN_PODS = ("--image", "example/hexad:1", "--volume", "shared=/work")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def printed(engine: str, *words: str) -> str:
    done = call("submit", "--engine", engine, "--print", "run.yaml", *words)
    assert done.status == 0, done.err
    return done.out


def refused(engine: str, *words: str) -> str:
    done = call("submit", "--engine", engine, "--print", "run.yaml", *words)
    assert done.status == 2
    return done.error


def test_slurm_takes_nodes_tasks_and_gpus_from_the_job() -> None:
    text = printed(
        "slurm", "--nodes", "4", "--cpus", "12", "--option", "partition=gpu", "--option", "exclusive"
    )
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    directives = dict(
        line[10:].partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH")
    )
    expected = {"nodes": "4", "ntasks-per-node": "8", "gpus-per-node": "8", "cpus-per-task": "12"}
    expected |= {"partition": "gpu", "exclusive": "", "requeue": "", "signal": "USR1@180"}
    assert directives.items() >= expected.items()
    assert "--cpus-per-task=12" in text.split("srun", 1)[1]  # which srun does not take from the job


def test_options_replace_the_defaults_of_slurm() -> None:
    text = printed("slurm", "--nodes", "2", "--option", "signal=USR1@600")
    assert "--signal=USR1@600" in text and "USR1@180" not in text


def test_fewest_nodes_hold_the_degrees() -> None:
    document = call("submit", "--engine", "slurm", "--print", "--json", "run.yaml", "parallel.pipeline=8")
    job = json.loads(document.out)
    assert (job["nodes"], job["ranks_per_node"]) == (2, 8)
    small = json.loads(call("submit", "--engine", "slurm", "--print", "--json", "run.yaml").out)
    assert (small["nodes"], small["ranks_per_node"]) == (1, 2)


def test_a_sweep_combines_the_values_of_settings() -> None:
    text = printed("slurm", "--sweep", "optimizer.lr=1e-3,3e-4", "--sweep", "run.seed=1,2")
    assert "#SBATCH --array=0-3" in text
    code = text.split("settings=")[1].split("ending=")[0]
    script = f'SLURM_ARRAY_TASK_ID=2\nsettings={code}\nprintf "%s\\n" "${{element[@]}}"'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert words == ["optimizer.lr=3e-4", "run.seed=1", "run.dir=runs/job/lr=3e-4,seed=1"]


@pytest.mark.parametrize(("nodes", "workers"), [("4", 32), ("2:4", (16, 32))])
def test_ray_starts_a_worker_for_each_rank(nodes: str, workers: object) -> None:
    options = (
        "--nodes",
        nodes,
        "--cpus",
        "3",
        "--gpu",
        "H100",
        "--option",
        "max_failures=2",
        "--option",
        "disk=1",
    )
    tree = ast.parse(printed("ray", *options, "optimizer.lr=1e-3"))
    calls = {
        ast.unparse(node.func).rpartition(".")[2]: node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    scaling = {word.arg: ast.literal_eval(word.value) for word in calls["ScalingConfig"].keywords}
    assert scaling["num_workers"] == workers and scaling["use_gpu"] is True
    assert scaling["resources_per_worker"] == {"CPU": 3, "disk": 1.0}
    assert scaling["accelerator_type"] == "H100"
    assert ast.literal_eval(calls["FailureConfig"].keywords[0].value) == 2


def closed(schema: Any) -> Any:
    """A schema that refuses unknown fields, as the API server does for kubectl."""
    if isinstance(schema, dict):
        inner = {name: closed(part) for name, part in schema.items()}
        kept = schema.get("x-kubernetes-preserve-unknown-fields")
        if "properties" in schema and "additionalProperties" not in schema and not kept:
            inner["additionalProperties"] = False
        if schema.get("x-kubernetes-int-or-string"):
            inner.pop("anyOf", None)
            inner["type"] = ["integer", "string"]
        return inner
    return [closed(part) for part in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize(("engine", "kind"), [("kubernetes", "TrainJob"), ("jobset", "JobSet")])
@pytest.mark.parametrize(
    "gpu", ((), ("--gpu", "NVIDIA-H100", "--cpus", "4", "--option", "example.org/zone=a"))
)
def test_manifests_meet_the_published_schemas(engine: str, kind: str, gpu: tuple[str, ...]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    settings, resource = yaml.safe_load_all(printed(engine, "--nodes", "4", *IN_PODS, *gpu))
    assert (settings["kind"], resource["kind"]) == ("ConfigMap", kind)
    assert settings["data"]["run.yaml"] == RUN
    schema = closed(json.loads(gzip.decompress((SCHEMAS / f"{kind.lower()}.json.gz").read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}
    checker = jsonschema.Draft202012Validator(schema)
    checker.validate(resource)
    resource["spec"]["surplus"] = 1  # the check can fail
    assert not checker.is_valid(resource)


@pytest.mark.parametrize("engine", ["kubernetes", "jobset"])
def test_pods_run_torchrun_in_the_shared_volume(engine: str) -> None:
    _, resource = yaml.safe_load_all(printed(engine, "--nodes", "4", *IN_PODS, "optimizer.lr=1e-3"))
    text = json.dumps(resource)
    assert "cd /work" in text
    assert "--nproc-per-node 8" in text
    assert "hexad train /etc/hexad/run.yaml optimizer.lr=1e-3" in text
    assert "numProcPerNode" not in text and "podTemplateOverrides" not in text  # gone from TrainJob


def test_skypilot_starts_torchrun_on_each_node() -> None:
    words = ("--nodes", "4", "--gpu", "H100", "--option", "use_spot=true", "--volume", "store=/data")
    task = yaml.safe_load(printed("skypilot", *words, "--setup", "pip install hexad"))
    assert task["num_nodes"] == 4
    assert task["resources"] == {"accelerators": "H100:8", "use_spot": True}
    assert task["volumes"] == {"/data": "store"}
    assert "--nproc-per-node 8" in task["run"] and task["run"].endswith("hexad train run.yaml\n")
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True).returncode == 0
    sky = pytest.importorskip("sky")
    Path("task.yaml").write_text(yaml.safe_dump(task))
    assert sky.Task.from_yaml("task.yaml").num_nodes == 4


@pytest.mark.parametrize(
    ("engine", "words", "problem"),
    [
        (
            "slurm",
            ("--image", "x"),
            "--image: is not used by --engine slurm, but by kubernetes, jobset, skypilot",
        ),
        ("slurm", ("--nodes", "2:4"), "--nodes: found a range with --engine slurm; use a number, or ray"),
        ("slurm", ("--nodes", "4:2"), "'--nodes': found '4:2', expected a number such as 4, or a range"),
        ("slurm", ("--nodes", "0"), "'--nodes': found '0'"),
        ("slurm", ("--nodes", "3", "parallel.tensor=16"), "parallel.tensor: found 16, but world 24"),
        (
            "slurm",
            ("--sweep", "optimizer.lr"),
            "--sweep: found 'optimizer.lr', expected a setting and its values",
        ),
        ("slurm", ("--sweep", "optimiser.lr=1,2"), "(did you mean 'optimizer.lr'?)"),
        ("slurm", ("--sweep", "run.dir=a,b"), "--sweep: found run.dir"),
        ("slurm", ("--sweep", "optimizer.lr=1e-3,fast"), "optimizer.lr: found 'fast'"),
        ("slurm", ("--option", "=gpu"), "--option: found '=gpu', expected KEY=VALUE"),
        (
            "slurm",
            ("--per-node", "3", "parallel.pipeline=4"),
            "--per-node: found 3, which does not divide the 8",
        ),
        ("ray", ("--option", "memory=much"), "--option: found 'much', expected the number of a resource"),
        ("kubernetes", ("--image", "x"), "--volume: is missing"),
        (
            "kubernetes",
            (*IN_PODS, "--option", "partition=gpu"),
            "--option: found 'partition', expected runtime",
        ),
        ("jobset", ("--volume", "a=/b"), "--image: is missing"),
        ("skypilot", (), "--gpu: is missing"),
        (
            "skypilot",
            ("--gpu", "H100", "--sweep", "run.seed=1,2"),
            "--sweep: is not used by --engine skypilot",
        ),
        ("pbs", (), "--engine"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(engine: str, words: tuple[str, ...], problem: str) -> None:
    assert problem in refused(engine, *words)


def test_skypilot_copies_the_working_directory_with_the_configuration(project: Path) -> None:
    (project / "inner").mkdir()
    (project / "inner/run.yaml").write_text(RUN)
    words = ("submit", "--engine", "skypilot", "--print", "--gpu", "H100")
    inside = call(*words, str(project / "inner/run.yaml"))
    assert yaml.safe_load(inside.out)["run"].endswith("hexad train inner/run.yaml\n")
    os.chdir(project / "inner")
    assert "outside the working directory" in call(*words, str(project / "run.yaml")).error


def test_a_missing_command_of_the_engine_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project))
    done = call("submit", "--engine", "slurm", "run.yaml")
    assert done.status == 2
    assert (
        "not found: sbatch; run this where the engine's commands are installed, or with --print" in done.err
    )
    assert (project / "runs/job/submit/job.sh").is_file()


KUBECTL = """\
#!/bin/bash
echo "$*" >> calls
case "$1" in
    logs) echo "step 1"; echo "step 2";;
    get) [ -e restarted ] && echo '{"status": {"conditions": [{"type": "Complete", "status": "True"}]}}' \\
            || { touch restarted; echo '{"status": {}}'; };;
esac
"""


def test_kubernetes_follows_the_first_pod_until_the_job_has_ended(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "kubectl").write_text(KUBECTL)
    (project / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}:/usr/bin:/bin")
    monkeypatch.setattr("hexad.submit.kubernetes._POLL", 0.01)
    done = call("submit", "--engine", "kubernetes", "run.yaml", "--nodes", "2", *IN_PODS)
    assert done.status == 0, done.err
    calls = (project / "calls").read_text().splitlines()
    assert calls[0].startswith("apply --filename ") and calls[0].endswith("runs/job/submit/job.yaml")
    assert sum(line.startswith("logs --follow") for line in calls) == 2  # again after a restart
    assert capfd.readouterr().out.count("step 2") == 2
