"""DeepSpeedExamples' own scripts with the ``deepspeed`` package and with Hexad's interface, on CPUs.

Needs the ``deepspeed`` package, a checkout of DeepSpeedExamples, and the packages that its scripts import:

    pip install torchvision datasets fire loguru pytz sh tensorboard transformers
    git clone https://github.com/deepspeedai/DeepSpeedExamples
    python benchmarks/deepspeed_examples.py --source DeepSpeedExamples \\
        --output benchmarks/results/deepspeed_examples.json

Do scripts run to their end, with which losses? Scripts are not edited. Their arguments make them small; data
sets, tokenizers and models are made here (:func:`replace_data`); ``torch.cuda.set_device`` and
``synchronize`` do nothing, and what :class:`Example` lists is replaced in the text, for both packages alike.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from facts import facts

CHAT = "applications/DeepSpeed-Chat"


@dataclass(frozen=True)
class Example:
    """A script and how it is run.

    Attributes:
        script: below the checkout.
        arguments: ``{work}`` is a directory with data, ``{rank}`` the local rank.
        ranks: started by torchrun.
        config: written to ``{work}/ds.json``.
        replaced: texts of the script and what replaces them, because there is no GPU or to make it small.
        tolerance: of losses, relative.
    """

    script: str
    arguments: str
    ranks: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    replaced: tuple[tuple[str, str], ...] = ()
    tolerance: float = 1e-5


def _cifar(stage: int, dtype: str = "fp32") -> Example:
    return Example("training/cifar/cifar10_deepspeed.py", f"-e 2 --dtype {dtype} --stage {stage}")


def _pipeline(stages: int) -> Example:
    adam = {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8}}
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    arguments = f"--deepspeed_config {{work}}/ds.json -p {stages} --steps 10 --backend gloo"
    return Example("training/pipeline_parallelism/train.py", arguments, config={**sizes, "optimizer": adam})


def _sft(stage: int) -> Example:
    return Example(
        f"{CHAT}/training/step1_supervised_finetuning/main.py",
        "--local_rank={rank} --data_path local/jsonfile --data_split 10,0,0 "
        "--model_name_or_path {work}/opt --per_device_train_batch_size 2 "
        "--per_device_eval_batch_size 2 --max_seq_len 64 --num_train_epochs 2 "
        f"--zero_stage {stage} --dtype bf16 --output_dir {{work}}/out --data_output_path {{work}}/index "
        "--learning_rate 1e-3",
        tolerance=1e-3,
    )


EXAMPLES = {
    **{f"cifar, stage {stage}": _cifar(stage) for stage in range(4)},
    "cifar, bf16, stage 2": _cifar(2, "bf16"),
    "pipeline_parallelism, 2 stages": _pipeline(2),
    "pipeline_parallelism, data parallel": _pipeline(0),
    "gan": Example(
        "training/gan/gan_deepspeed_train.py",
        "--dataset fake --workers 0 --batchSize 4 --ngf 8 --ndf 8 --nz 10 --epochs 2 --outf {work} "
        "--tensorboard_path {work}/tb --deepspeed_config {work}/ds.json",
        config={
            "train_batch_size": 8,
            "optimizer": {"type": "Adam", "params": {"lr": 2e-4, "betas": [0.5, 0.999], "eps": 1e-8}},
        },
        replaced=(
            ('torch.device("cuda", args.local_rank)', 'torch.device("cpu")'),
            ("dset.FakeData(image_size", "dset.FakeData(size=16, image_size"),
        ),
    ),
    "HelloDeepSpeed": Example(
        "training/HelloDeepSpeed/train_bert_ds.py",
        "--checkpoint_dir={work}/saved --tokenizer={work}/roberta --num_layers=2 --num_heads=4 --ff_dim=64 "
        "--h_dim=32 --batch_size=4 --num_iterations=31 --checkpoint_every=20 --max_seq_length=64 "
        "--local_rank=-1",
        ranks=1,
    ),
    **{f"DeepSpeed-Chat SFT, stage {stage}": _sft(stage) for stage in (2, 3)},
}


# In each rank


def replace_data() -> None:
    """Data sets that scripts would download, and what a CPU or a later release of transformers lacks."""
    import numpy
    import torch

    sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision")  # its kernels are CUDA's
    torch.cuda.set_device = lambda *_: None
    torch.cuda.synchronize = lambda *_: None
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    from PIL import Image

    class Images(torch.utils.data.Dataset):
        def __init__(self, transform: Any = None, **_: Any) -> None:
            self.transform = transform

        def __len__(self) -> int:
            return 40

        def __getitem__(self, number: int) -> Any:
            if number >= len(self):
                raise IndexError(number)
            generator = numpy.random.default_rng(number)
            label = int(generator.integers(10))
            image = Image.fromarray((generator.integers(0, 200, (32, 32, 3)) + 5 * label).astype("uint8"))
            return image if self.transform is None else self.transform(image), label

    import datasets
    import torchvision
    import transformers

    torchvision.datasets.CIFAR10 = Images
    lines = [line for line in Path(os.__file__).read_text(encoding="utf-8").splitlines() if len(line) > 30]
    load = datasets.load_dataset
    datasets.load_dataset = lambda name, *rest, **more: (
        load(name, *rest, **more) if name == "json" else datasets.Dataset.from_dict({"text": lines[:60]})
    )
    modeling = import_module("transformers.modeling_utils")
    modeling.no_init_weights = import_module("transformers.initialization").no_init_weights
    transformers.PreTrainedTokenizerFast.save_vocabulary = lambda *_: ()


def make_models(work: Path) -> None:
    """Small tokenizers, a model and conversations, from the text of Python's own modules."""
    import torch
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    text = Path(os.__file__).read_text(encoding="utf-8") + Path(argparse.__file__).read_text(encoding="utf-8")
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(text.splitlines(), vocab_size=600, special_tokens=special)
    trained.save(str(work / "tokenizer.json"))
    for name, first in (("roberta", "<s>"), ("opt", "</s>")):
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_file(str(work / "tokenizer.json")),
            **dict(
                zip(("bos_token", "eos_token", "pad_token", "mask_token"), (first, "</s>", "<pad>", "<mask>"))
            ),
        ).save_pretrained(work / name)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "max_position_embeddings": 128}
    config = OPTConfig(vocab_size=600, num_hidden_layers=2, num_attention_heads=4, dropout=0.0, **sizes)
    OPTForCausalLM(config).save_pretrained(work / "opt")
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 30]
    rows = [
        {"prompt": f"Human: {a} Assistant:", "chosen": f" {b}", "rejected": f" {c}"}
        for a, b, c in zip(lines[::3], lines[1::3], lines[2::3])
    ]
    (work / "data").mkdir()
    for name, count in (("train", 24), ("eval", 8)):
        (work / "data" / f"{name}.json").write_text("\n".join(map(json.dumps, rows[:count])))


def worker(package: str, source: Path, work: Path, name: str) -> None:
    """Run a script in this rank and write the losses that the engine saw."""
    example, rank = EXAMPLES[name], os.environ["LOCAL_RANK"]
    if package == "hexad":
        from hexad.compat import deepspeed as interface

        interface.install()
    import_module("deepspeed")  # before torch.cuda changes: the package looks for devices there
    replace_data()
    losses: list[float] = []
    engine = import_module("deepspeed.runtime.engine").DeepSpeedEngine
    pipeline = import_module("deepspeed.runtime.pipe.engine").PipelineEngine
    backward, train_batch = engine.backward, pipeline.train_batch

    def recording_backward(self: Any, loss: Any, *rest: Any, **more: Any) -> Any:
        losses.append(float(loss))
        return backward(self, loss, *rest, **more)

    def recording_train_batch(self: Any, *rest: Any, **more: Any) -> Any:
        loss = train_batch(self, *rest, **more)
        losses.append(float(loss))
        return loss

    engine.backward, pipeline.train_batch = recording_backward, recording_train_batch
    script = source / example.script
    text = script.read_text(encoding="utf-8")
    for old, new in example.replaced:
        assert old in text, old
        text = text.replace(old, new)
    sys.argv = [str(script), *example.arguments.format(work=work, rank=rank).split()]
    sys.path[:0] = [str(script.parent), str(work), str(source / CHAT)]
    exec(compile(text, str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})
    (work / f"losses-{rank}.json").write_text(json.dumps(losses))


# The comparison


def run(package: str, source: Path, name: str) -> list[float] | str:
    """The first rank's losses, or the last line of an error."""
    example = EXAMPLES[name]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        make_models(work)
        (work / "ds.json").write_text(json.dumps(example.config))
        checkout = work / "checkout"  # DeepSpeed-Chat reads data below itself
        checkout.mkdir()
        for entry in source.iterdir():
            (checkout / entry.name).symlink_to(entry.resolve())
        if example.script.startswith(CHAT):
            (checkout / "applications").unlink()
            subprocess.run(["cp", "-r", str(source / "applications"), str(checkout)], check=True)
            subprocess.run(["cp", "-r", str(work / "data"), str(checkout / CHAT)], check=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={example.ranks}", str(Path(__file__).resolve()), "--worker", package]
        command += ["--source", str(checkout), "--work", directory, "--only", name]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=work)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "Error: " in line]
            return errors[0].strip() if errors else f"exit status {done.returncode}"
        return list(json.loads((work / "losses-0.json").read_text()))


def compared(source: Path, name: str) -> dict[str, Any]:
    """What came of an example with both packages."""
    theirs, ours = run("deepspeed", source, name), run("hexad", source, name)
    result: dict[str, Any] = {"example": name, "script": EXAMPLES[name].script}
    for package, losses in (("deepspeed", theirs), ("hexad", ours)):
        if isinstance(losses, str):
            result[f"error with {package}"] = losses
    if isinstance(theirs, list) and isinstance(ours, list):
        error = max((abs(a - b) / abs(a) for a, b in zip(theirs, ours)), default=1.0)
        equal = len(theirs) == len(ours) > 0 and error <= EXAMPLES[name].tolerance
        result |= {"losses": len(ours), "largest relative difference": error, "equal": equal}
    print(result, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="checkout of DeepSpeedExamples")
    parser.add_argument("--output", type=Path, help="result file")
    parser.add_argument("--only", help="one of the examples")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.source, options.work, options.only)
        return
    results = [compared(options.source, name) for name in EXAMPLES if options.only in (None, name)]
    document = {**facts(), "examples": results}
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
