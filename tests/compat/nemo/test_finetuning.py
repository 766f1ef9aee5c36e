"""Fine-tuning in NeMo's words: a Hugging Face model in, adapters trained, texts and a model out."""

import json
from pathlib import Path
from typing import Any

import pytest

from ...pool import Pool
from ...training.command import call

pytest.importorskip("lightning")
SIZES = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 64,
    "vocab": 257,
    "max_positions": 64,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Hugging Face's format, of random weights."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "text.txt").write_text("some text\n" * 40)
    options = ("--tokenizer", "byte", "--workers", "1", "--output", str(directory / "data"))
    assert call("data", "build", "--input", str(directory / "text.txt"), *options).status == 0
    given = {"run": {"dir": str(directory / "run"), "steps": 1}, "model": SIZES}
    given |= {"data": {"train": str(directory / "data"), "sequence": 16}, "batch": {"micro": 1, "global": 1}}
    (directory / "run.yaml").write_text(json.dumps(given))
    assert call("train", str(directory / "run.yaml"), "--nproc", "1").status == 0
    assert (
        call("checkpoint", "export", "--from", str(directory / "run"), "--to", str(directory / "hf")).status
        == 0
    )
    return directory / "hf"


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and answers, and conversations."""
    directory = tmp_path_factory.mktemp("lines")
    for name in ("training", "validation"):
        records = [{"input": f"square of {n}?", "output": f"{n * n}"} for n in range(30)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


def finetuned(source: str, lines: str, directory: str) -> dict[str, Any]:
    """Import, fine-tune, generate and export; what was seen."""
    from lightning.pytorch import Callback

    from hexad.compat import nemo as nl
    from hexad.compat.megatron import OptimizerConfig
    from hexad.compat.nemo import llm

    from ..lightning.program import launched

    seen: dict[str, Any] = {"losses": []}

    class Seen(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen["losses"].append(float(trainer.callback_metrics["reduced_train_loss"]))

    place = Path(directory)
    with launched():
        tokenizer = nl.tokenizers.get_tokenizer("byte")
        data = llm.FineTuningDataModule(lines, 64, tokenizer, 1, 2)
        module = llm.LlamaModel(llm.Llama3Config8B(), tokenizer=tokenizer)
        imported = llm.import_ckpt(module, f"hf://{source}", place / "imported")
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = nl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=4,
            log_every_n_steps=1,
            limit_val_batches=1,
            num_sanity_val_steps=0,
            strategy=nl.MegatronStrategy(),
            callbacks=[Seen()],
            **quiet,
        )
        seen["place"] = llm.finetune(
            module,
            data,
            trainer,
            nl.NeMoLogger(explicit_log_dir=str(place / "tuned"), ckpt=nl.ModelCheckpoint(None, save_top_k=0)),
            nl.AutoResume(restore_config=nl.RestoreConfig(str(imported))),
            nl.MegatronOptimizerModule(OptimizerConfig(lr=0.01)),
            llm.peft.LoRA(["linear_qkv", "linear_fc2"], dim=4, alpha=8),
        )
        last = seen["place"] / "checkpoints" / "last.ckpt"
        seen["texts"] = llm.generate(last, trainer, ["square of 3?"], text_only=True)
        seen["exported"] = sorted(path.name for path in llm.export_ckpt(last, "hf", place / "out").iterdir())
    return seen


def test_equal_to_the_command(pool: Pool, tmp_path: Path, model: Path, lines: Path) -> None:
    seen = pool.run(1, finetuned, str(model), str(lines), str(tmp_path))[0]
    path = tmp_path / "tuned" / "run.yaml"
    assert call("train", str(path), "--nproc", "1", f"run.dir={tmp_path / 'run'}").status == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert seen["losses"] == pytest.approx([line["loss"] for line in metrics], rel=1e-6)
    assert min(line["grad_norm"] for line in metrics) > 0
    assert len(seen["texts"]) == 1
    assert {"config.json", "model.safetensors"} <= set(seen["exported"])
