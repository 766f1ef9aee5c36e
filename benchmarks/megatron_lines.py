"""Launch lines of Megatron-LM and of its forks: which does ``hexad megatron`` translate?

    git clone https://github.com/NVIDIA/Megatron-LM
    git clone https://github.com/swiss-ai/Megatron-LM swiss-ai
    python benchmarks/megatron_lines.py --source Megatron-LM swiss-ai --output megatron_lines.json

Lines of Megatron-LM's functional tests are ``MODEL_ARGS`` of their ``model_config.yaml``; those of other
programs than ``pretrain_gpt.py`` (``MODE: inference`` and ``rl``) are counted apart. Other lines are what
shell scripts pass to programs that pretrain decoders (``launch_scripts.py`` reads them, on Linux); those that
lack the value of an argument or a variable that was not given are incomplete. Data, tokenizers and
checkpoints that a line names are not at hand: mock data and a null tokenizer replace them. A line of a script
runs if it also passes the checks before a run; ``--lines`` prints the reason of each line that does not.
"""

import argparse
import json
import re
import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import yaml
from facts import facts
from launch_scripts import launch_lines

from hexad.compat.megatron.arguments import derive, naming_flags, parse
from hexad.compat.megatron.tables import FLAGS
from hexad.compat.megatron.translate import translated
from hexad.config import HexadError
from hexad.model.configuration import load_config
from hexad.planning import check_config, smallest_world, working_layout

ARGUMENTS = {
    "examples/gpt3/train_gpt3_175b_distributed.sh": "checkpoints logs vocab.json merges.txt data",
    "examples/llama/train_llama3_8b_h100_fp8.sh": "checkpoints logs MOCK MOCK",
    "examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh": "checkpoints logs MOCK MOCK",
    "examples/mixtral/train_mixtral_8x7b_distributed.sh": "checkpoints tokenizer.model data",
    "examples/gptoss/02_train.sh": "--checkpoint-path .",
}
"""Script -> its arguments, where no README has a complete call."""
PROGRAMS = re.compile(
    r"\bpretrain_(?!bert|t5|ict|retro|vision|vlm|mamba|hybrid|prefix|llava|biencoder|deepseek4|\w*(vl|omni))"
    r"\w+\.py"
)
"""Programs that pretrain decoders of text."""
TESTS = ("gpt", "mixtral", "moe")
MISSING = (
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "tokenizer_model",
    "tokenizer_name_or_path",
    "vocab_file",
    "merge_file",
    "load",
    "pretrained_checkpoint",
)
"""Attributes of flags that name files."""
DIRECTORIES = ("save", "tensorboard_dir", "data_cache_path", "hf_cfg_dir", "mg_save_dir")
INCOMPLETE = re.compile(r"expected (at least )?one argument|is missing; give it")
"""Refusals of a line that lacks an argument or a variable of its script."""


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


def problem(words: Sequence[str], world: int | None = None, check: bool = False) -> str | None:
    """Why a line is refused; None if it is translated, and with ``check`` would start."""
    try:
        line = parse(words)
        arguments: Namespace = line.arguments
        for name in MISSING:
            setattr(arguments, name, None)
        if arguments.deepspeed_config and not Path(arguments.deepspeed_config).is_file():
            arguments.deepspeed_config = None
        arguments.mock_data, arguments.tokenizer_type = True, "NullTokenizer"
        arguments.vocab_size = arguments.vocab_size or 50000
        if world is not None:
            model = arguments.tensor_model_parallel_size * arguments.pipeline_model_parallel_size
            world -= world % (model * arguments.context_parallel_size)
        derive(arguments, world)
        tree = translated(line).tree
        if check:
            with naming_flags():
                config = load_config(tree)
                check_config(config, working_layout(config, smallest_world(config)))
    except HexadError as error:
        return str(error)
    return None


def without_files(words: Sequence[str]) -> list[str]:
    """A script's words without the values of flags that name files, which may be missing or a sentence
    (``your path``); later ones of the same flag win."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            known = FLAGS.get(word.partition("=")[0])
            dropping = known is not None and known.attribute in (*MISSING, *DIRECTORIES)
        if not dropping:
            kept.append(word)
    return kept


def scripts(source: Path) -> dict[str, str | None]:
    """Line of a shell script -> why it is refused; None if it runs."""
    results: dict[str, str | None] = {}
    with launch_lines(source, ARGUMENTS, PROGRAMS) as lines:
        for line in lines:
            number = sum(name.split(" ")[0] == line.script for name in results) + 1
            with chdir(line.directory if line.directory.is_dir() else "."):
                why = problem(without_files(line.words), check=True)
            results[f"{line.script} {number}"] = why
    return results


def functional_tests(source: Path) -> dict[str, Any]:
    """Counts and refusals of Megatron-LM's functional tests."""
    lines = list(tests(source))
    modes = Counter(mode for _, mode, _ in lines)
    trained = {name: problem(words, 4096) for name, mode, words in lines if mode == "training"}
    refused = {name: why for name, why in trained.items() if why is not None}
    return {
        "lines": len(trained),
        "accepted": len(trained) - len(refused),
        "other modes": {mode: count for mode, count in modes.items() if mode != "training"},
        "refused": refused,
    }


def reasons(refused: Iterable[str]) -> list[tuple[str, int]]:
    """Reasons without the values of the single line, most frequent first."""
    plain = (re.sub(r"found [^;,]*[,;]", "found ...,", why) for why in refused)
    return Counter(plain).most_common()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, nargs="+", required=True, help="checkouts")
    parser.add_argument("--lines", action="store_true", help="print every line with its reason")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    document: dict[str, Any] = {**facts(), "flags": len(FLAGS), "repositories": {}}
    for source in options.source:
        found = scripts(source)
        incomplete = [name for name, why in found.items() if why is not None and INCOMPLETE.search(why)]
        complete = {name: why for name, why in found.items() if name not in incomplete}
        refused = {name: why for name, why in complete.items() if why is not None}
        entry = {"lines": len(complete), "accepted": len(complete) - len(refused), "refused": refused}
        entry["incomplete"] = incomplete
        print(
            f"{source.name}: {entry['accepted']} of {entry['lines']} lines of scripts run, "
            f"{len(incomplete)} others are incomplete"
        )
        whys = refused.items() if options.lines else reasons(refused.values())
        for why, count in whys:
            print(f"  {count:>4} {why}")
        suite = functional_tests(source)
        if suite["lines"]:
            entry["functional tests"] = suite
            print(f"  functional tests: {suite['accepted']} of {suite['lines']} translated")
            for why, count in reasons(suite["refused"].values()):
                print(f"  {count:>4} {why}")
        document["repositories"][source.name] = entry
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
