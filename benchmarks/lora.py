"""Memory and communication of LoRA against full training: predicted for large models, and for a small one
measured beside the prediction.

    python benchmarks/lora.py            # the table of docs/fine-tuning.md
    python benchmarks/lora.py --json
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from hexad.model.configuration import build_config
from hexad.planning import resolve
from hexad.planning.costs import parameter_count, trained_count
from hexad.planning.memory import largest, per_pipeline_rank
from hexad.topology.layout import Layout

LORA = {"rank": 16, "alpha": 32.0}
LARGE = (
    ("llama3.1-8b", {"data": 8, "zero": 0}),
    ("llama3.1-8b", {"data": 8, "zero": 3}),
    ("llama3.1-70b", {"tensor": 8, "data": 8, "zero": 1}),
)


def predicted(preset: str, parallel: dict[str, Any], lora: dict[str, Any] | None) -> dict[str, float]:
    """GiB of the rank that needs the most, and trained parameters."""
    tree = {
        "run": {"device": "cuda"},
        "model": {"preset": preset, "lora": lora},
        "data": {"sequence": 4096},
        "batch": {"micro": 1, "global": 64},
        "parallel": parallel,
        "precision": {"dtype": "bf16"},
        "memory": {"recompute": "full"},
    }
    config = build_config(tree)
    world = parallel.get("tensor", 1) * parallel["data"]
    resolved = resolve(config, Layout(world=world, **{k: v for k, v in parallel.items() if k != "zero"}))
    plan = largest(per_pipeline_rank(resolved))
    trained = trained_count(config.model)
    return {
        "parameters": parameter_count(config.model),
        "trained": trained,
        "state_gib": plan.state / 2**30,
        "total_gib": plan.total / 2**30,
    }


def measured(lora: dict[str, Any] | None) -> dict[str, float]:
    """The same of a small model on two ranks here, with the peak and the bytes that were measured."""
    from tests.memory.measure import measure, measured_config
    from tests.pool import Pool

    config = measured_config(model={"lora": lora}, parallel={"data": 2, "zero": 0, "bucket_mb": 25})
    pool = Pool()
    try:
        figures = pool.run(2, measure, config, 2)[0]
        sent = pool.run(2, sent_bytes, config)[0]
    finally:
        pool.close()
    elements = trained_count(config.model)
    return {
        "trained": elements,
        "peak_mib": figures.peak / 2**20,
        "predicted_mib": figures.plan.total / 2**20,
        "sent_bytes": sent,
        "elements_bytes": 4 * elements,
    }


def sent_bytes(config: Any) -> int:
    """Bytes that this rank sends over the data axis in a step."""
    import torch

    from hexad.dataset.load.microbatch import Microbatch
    from hexad.engine.engine import Engine
    from hexad.topology.mesh import Mesh

    mesh = Mesh.create(Layout.from_settings(config.parallel, 2), torch.device("cpu"))
    engine = Engine(config, mesh)
    tokens = torch.arange(config.batch.micro * config.data.sequence).view(config.batch.micro, -1) % 100
    batch = [Microbatch(tokens, tokens)] * (config.batch.global_ // config.batch.micro // 2)
    before = mesh.sent_bytes()["data"]
    engine.train_step(batch)
    return mesh.sent_bytes()["data"] - before


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    large = [
        {"model": preset, "parallel": parallel, "kind": kind, **predicted(preset, parallel, lora)}
        for preset, parallel in LARGE
        for kind, lora in (("full", None), ("LoRA", LORA))
    ]
    small = [{"kind": kind, **measured(lora)} for kind, lora in (("full", None), ("LoRA", {"rank": 8}))]
    if options.json:
        print(json.dumps({"predicted": large, "measured": small}))
        return
    print("| model | layout | | trained | state GiB | peak GiB |")
    print("|---|---|---|---|---|---|")
    for row in large:
        layout = ", ".join(f"{name} {value}" for name, value in row["parallel"].items())
        print(
            f"| {row['model']} | {layout} | {row['kind']} | {row['trained'] / 1e6:,.0f} M "
            f"| {row['state_gib']:.1f} | {row['total_gib']:.1f} |"
        )
    print()
    for row in small:
        error = row["predicted_mib"] / row["peak_mib"] - 1
        print(
            f"{row['kind']}: peak {row['peak_mib']:.2f} MiB measured, {row['predicted_mib']:.2f} predicted "
            f"({error:+.1%}); {row['sent_bytes']:,} bytes sent over data, trained {row['elements_bytes']:,}"
        )


if __name__ == "__main__":
    main()
