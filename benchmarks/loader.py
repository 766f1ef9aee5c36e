"""How fast the loader opens large data and reads microbatches.

Writes a synthetic dataset into a temporary directory (2 bytes per token), then measures in this process:

- ``open_seconds``: ``DataLoader(...)`` until it is ready;
- ``index_seconds``: the first step, which builds the epoch's index;
- ``tokens_per_second``: input tokens of all further steps, in one thread, without reading ahead;
- ``megatron_*``: the same of megatron-core's GPTDataset in this process, where it is installed, for just
  the samples that are read, stacked into the same tensors (it makes a loss mask and positions besides);
- ``ratio``: our tokens per second to its.

    python benchmarks/loader.py --tokens 1e8 --documents 1e5 --sequence 4096 --json
"""

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from hexad.dataset.indexed import IndexedWriter
from hexad.dataset.load.loader import DataLoader

VOCAB = 50_000


def write(prefix: Path, tokens: int, documents: int) -> None:
    """Random ids in documents of random length (log-normal, as web text roughly is)."""
    rng = np.random.default_rng(0)
    weight = rng.lognormal(0.0, 1.0, documents)
    ends = np.round(np.cumsum(weight) / weight.sum() * tokens).astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for part in np.array_split(lengths, max(1, tokens >> 24)):
            writer.add_documents(rng.integers(0, VOCAB, part.sum(), dtype=np.uint16), part)


def measure(prefix: Path, args: argparse.Namespace) -> dict[str, float]:
    """Figures of one loader."""
    start = time.perf_counter()
    loader = DataLoader(
        str(prefix),
        sequence=args.sequence,
        documents=args.documents_mode,
        micro=args.micro,
        global_batch=args.global_batch,
        seed=1,
        vocab=VOCAB,
    )
    opened = time.perf_counter()
    loader._read(0)  # not step(): reading ahead would be timed with it
    indexed = time.perf_counter()
    for step in range(1, args.steps + 1):
        loader._read(step * args.global_batch)
    done = time.perf_counter()
    loader.close()
    read = args.steps * args.global_batch * args.sequence
    return {
        "open_seconds": opened - start,
        "index_seconds": indexed - opened,
        "tokens_per_second": read / (done - indexed),
    }


def measure_megatron(prefix: Path, args: argparse.Namespace) -> dict[str, float]:
    """The same figures of megatron-core's GPTDataset, or nothing where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from megatron.core.datasets.indexed_dataset import IndexedDataset
            from megatron.core.datasets.utils import Split
    except ImportError:
        return {}

    class EndOfDocument:
        """What GPTDatasetConfig asks of a tokenizer."""

        eod, pad = 0, VOCAB
        vocab_size = VOCAB + 1
        unique_identifiers = {"class": "none"}

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=args.sequence,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(prefix.parent / "megatron"),
        tokenizer=EndOfDocument(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = (args.steps + 1) * args.global_batch
    start = time.perf_counter()
    low = IndexedDataset(str(prefix))
    opened = time.perf_counter()
    indices = np.arange(len(low), dtype=np.int32)
    dataset = GPTDataset(low, str(prefix), indices, samples, Split.train, config)
    for i in range(args.global_batch):
        dataset[i]
    indexed = time.perf_counter()
    for first in range(args.global_batch, samples, args.micro):
        rows = [dataset[i] for i in range(first, first + args.micro)]
        torch.stack([row["tokens"] for row in rows])
        torch.stack([row["labels"] for row in rows])
    done = time.perf_counter()
    return {
        "megatron_open_seconds": opened - start,
        "megatron_index_seconds": indexed - opened,
        "megatron_tokens_per_second": (samples - args.global_batch) * args.sequence / (done - indexed),
    }


def main() -> None:
    """Parse, write, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: int(float(text)), default=100_000_000)
    parser.add_argument("--documents", type=lambda text: int(float(text)), default=100_000)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--documents-mode", choices=("join", "isolate"), default="join")
    parser.add_argument("--directory", help="where to write; default: a temporary directory")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        prefix = Path(directory) / "synthetic"
        start = time.perf_counter()
        write(prefix, args.tokens, args.documents)
        written = time.perf_counter() - start
        figures = {"tokens": args.tokens, "documents": args.documents, "write_seconds": written}
        figures |= measure(prefix, args)
        figures |= measure_megatron(prefix, args)
    if "megatron_tokens_per_second" in figures:
        figures["ratio"] = figures["tokens_per_second"] / figures["megatron_tokens_per_second"]
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<28}{value:>18,.3f}")


if __name__ == "__main__":
    main()
