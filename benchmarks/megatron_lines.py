"""Launch lines of Megatron-LM's own examples and functional tests: which does ``hexad megatron`` translate?

    git clone https://github.com/NVIDIA/Megatron-LM
    python benchmarks/megatron_lines.py --source Megatron-LM --output megatron_lines.json

Lines of tests are ``MODEL_ARGS`` of their ``model_config.yaml``; those of other programs than
``pretrain_gpt.py`` (``MODE: inference`` and ``rl``) are counted apart. Lines of examples are what their
scripts pass to ``torchrun``: each is read by bash, in an empty directory, with a ``torchrun`` that prints its
arguments. Data, tokenizers and checkpoints that a line names are not at hand: mock data and a null tokenizer
replace them.
"""

import argparse
import json
import re
import shlex
import subprocess
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from facts import facts

from hexad.compat.megatron.arguments import derive, parse
from hexad.compat.megatron.flags import FLAGS
from hexad.compat.megatron.translate import translated
from hexad.config import HexadError

EXAMPLES = {
    "examples/gpt3/train_gpt3_175b_distributed.sh": "checkpoints logs vocab.json merges.txt data",
    "examples/llama/train_llama3_8b_h100_fp8.sh": "checkpoints logs MOCK MOCK",
    "examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh": "checkpoints logs MOCK MOCK",
    "examples/mixtral/train_mixtral_8x7b_distributed.sh": "checkpoints tokenizer.model data",
    "examples/gptoss/02_train.sh": "--checkpoint-path .",
}
"""Script -> its arguments."""
TESTS = ("gpt", "mixtral", "moe")
MISSING = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "load",
    "pretrained_checkpoint",
)
"""Attributes of flags that name files."""


def words_of(tree: dict[str, Any]) -> list[str]:
    """``MODEL_ARGS`` as the words of a line."""
    words = []
    for flag, value in tree.items():
        if value is None or value is False:
            continue
        words.append(flag)
        if value is not True:
            text = re.sub(r"\$\{?\w+\}?", "1", str(value))
            several = flag not in FLAGS or FLAGS[flag].several
            words += shlex.split(text) if several and not text.startswith(("[", "(")) else [text]
    return words


def tests(source: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(name, mode, words) of the functional tests."""
    for kind in TESTS:
        for path in sorted((source / "tests/functional_tests/test_cases" / kind).rglob("model_config.yaml")):
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
            arguments = document.get("MODEL_ARGS")
            if isinstance(arguments, dict):
                mode = document.get("MODE", "training").replace("pretraining", "training")
                yield f"{kind}/{path.parent.name}", mode, words_of(arguments)


def example_words(path: Path, given: str) -> list[str]:
    """The arguments that an example's script passes to ``pretrain_gpt.py``."""
    programs = " ".join(
        f"{name}() {{ printf '%s\\n' \"$@\"; exit; }};" for name in ("torchrun", "python", "uv")
    )
    program = f'{programs} source "$SCRIPT"'
    environment = {"PATH": "/usr/bin:/bin", "SCRIPT": str(path.resolve())}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "pretrain_gpt.py").touch()
        command = ["bash", "-c", program, "bash", *given.split()]
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    words = done.stdout.splitlines()
    script = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    return [] if script is None else words[script + 1 :]


def problem(words: list[str], world: int = 4096) -> str | None:
    """Why a line is refused; None if it is translated."""
    try:
        line = parse(words)
        arguments: Namespace = line.arguments
        for name in MISSING:
            setattr(arguments, name, None)
        arguments.mock_data, arguments.tokenizer_type = True, "NullTokenizer"
        arguments.vocab_size = arguments.vocab_size or 50000
        model = arguments.tensor_model_parallel_size * arguments.pipeline_model_parallel_size
        derive(arguments, world - world % (model * arguments.context_parallel_size))
        translated(line)
    except HexadError as error:
        return str(error)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="checkout of Megatron-LM")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    lines = list(tests(options.source))
    modes = Counter(mode for _, mode, _ in lines)
    refused = {name: why for name, mode, words in lines if mode == "training" and (why := problem(words))}
    accepted = modes["training"] - len(refused)
    print(
        f"functional tests: {accepted} of {modes['training']} training lines accepted; others: {dict(modes)}"
    )
    reasons = Counter(re.sub(r"found [^;,]*[,;]", "found ...,", why) for why in refused.values())
    for why, count in reasons.most_common():
        print(f"{count:4} {why}")
    examples = {path: problem(example_words(options.source / path, EXAMPLES[path])) for path in EXAMPLES}
    for path, why in examples.items():
        print(f"{path}: {why or 'accepted'}")
    document = {
        **facts(),
        "flags": len(FLAGS),
        "training lines": modes["training"],
        "accepted": accepted,
        "other modes": {mode: count for mode, count in modes.items() if mode != "training"},
        "refused": refused,
        "examples": examples,
    }
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
