"""Fine-tuning on conversations: the loss of transformers on the same ones, resumed and in layouts alike."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ..checkpoint.hugging_face import exact_functions
from ..dataset.chats import CONVERSATIONS, GENERATION, chat_tokenizer, write_lines
from ..pool import Pool
from .command import RunFile, call, write_run

LLAMA = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}  # fmt: skip


def chats(directory: Path, count: int) -> tuple[str, list[list[dict[str, Any]]]]:
    """A tokenizer and ``directory/d``, conversations of different lengths."""
    spec = chat_tokenizer(directory / "tok", GENERATION)
    conversations = []
    for number in range(count):
        base = CONVERSATIONS[number % 3]
        conversations.append(
            [{**message, "content": message["content"] + f" {number}" * number} for message in base]
        )
    write_lines(directory / "in.jsonl", [{"messages": conversation} for conversation in conversations])
    options = ("--output", str(directory / "d"), "--tokenizer", spec, "--workers", "1")
    built = call("data", "build", "--input", str(directory / "in.jsonl"), *options)
    assert built.status == 0 and "are trained" in built.out, built.err
    return spec, conversations


def oracle(directory: Path, spec: str, conversations: list[list[dict[str, Any]]]) -> tuple[float, float]:
    """Mean loss of the assistant's tokens and norm of its gradient: each conversation alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for messages in conversations:
        encoded = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        labels = encoded["input_ids"].masked_fill(encoded["assistant_masks"] == 0, -100)
        # Not their own loss, which is computed in float32; the same positions and labels.
        logits = model(encoded["input_ids"]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
        targets += int((labels[:, 1:] != -100).sum())
    (total / targets).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(total.detach()) / targets, float(norm)


def test_loss_and_gradient_equal_those_of_transformers(tmp_path: Path) -> None:
    """Conversations packed into samples by ours, one by one in theirs; in float64."""
    torch.manual_seed(7)
    spec, conversations = chats(tmp_path, 9)
    vocab = len(transformers.AutoTokenizer.from_pretrained(spec))
    config = transformers.LlamaConfig(vocab_size=vocab, **LLAMA)
    model = transformers.LlamaForCausalLM(config).double()
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(tmp_path / "hf")
    with exact_functions():
        loss, norm = oracle(tmp_path / "hf", spec, conversations)
    facts = _packing(tmp_path / "d", 256)
    assert 1 < facts["samples"] < 9 and facts["too_long"] == 0
    run = RunFile(tmp_path / "run.yaml", tmp_path / "run")
    tree = {"run": {"steps": 1, "dir": str(run.directory), "device": "cpu"},
            "model": {"load": f"hf:{tmp_path / 'hf'}"},
            "data": {"train": str(tmp_path / "d"), "tokenizer": spec, "sequence": 256},
            "batch": {"micro": 1, "global": facts["samples"]},  # the step is an epoch
            "precision": {"dtype": "fp64"}}  # fmt: skip
    run.path.write_text(str(tree))
    result = run.train()
    assert result.status == 0, result.err
    (line,) = run.metrics
    assert line["loss"] == pytest.approx(loss, rel=1e-12)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-11)


def _packing(prefix: Path, sequence: int) -> dict[str, Any]:
    from hexad.dataset.build.builder import inspect

    return dict(inspect(prefix, sequence=sequence)["packing"])


def tuned(directory: Path, **groups: dict[str, Any]) -> RunFile:
    spec, _ = chats(directory, 12)
    data = {"tokenizer": spec, "sequence": 224, **groups.pop("data", {})}
    return write_run(directory, str(directory / "d"), data=data, **groups)


def test_conversations_that_do_not_fit_are_refused_before_the_start(tmp_path: Path) -> None:
    run = tuned(tmp_path)
    for arguments in (["data.sequence=40"], ["data.sequence=40", "--dry-run"]):
        assert "documents are longer than data.sequence 40, the longest has" in run.train(*arguments).error
    assert not run.directory.exists()
    result = run.train("run.steps=1", "data.sequence=120", "data.too_long=truncate")
    assert (
        result.status == 0
        and "documents are longer than data.sequence 120: " in result.err
        and " 0 skipped" in result.err
    )


def test_resuming_continues_the_order(tmp_path: Path) -> None:
    complete = tuned(tmp_path / "a", run={"steps": 6}, batch={"global": 3})
    assert complete.train().status == 0
    halves = tuned(tmp_path / "b", run={"steps": 6}, batch={"global": 3})
    assert halves.train("run.steps=4").status == halves.train().status == 0
    assert halves.losses == complete.losses
    assert all(math.isfinite(loss) for loss in complete.losses)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["whole", "cut"])
@pytest.mark.parametrize(
    "layout",
    [("parallel.data=2", "parallel.tensor=2"), ("parallel.data=2", "parallel.zero=3"),
     ("parallel.pipeline=2", "model.layers=2")],
)  # fmt: skip
def test_layouts_have_the_same_losses(
    tmp_path: Path, pool: Pool, layout: tuple[str, ...], packing: str
) -> None:
    groups: dict[str, Any] = {"data": {"packing": packing}, "run": {"steps": 4}, "model": {"layers": 2}}
    alone = tuned(tmp_path / "a", **{name: dict(group) for name, group in groups.items()})
    assert alone.train().status == 0
    together = tuned(tmp_path / "b", **groups)
    ranks = math.prod(
        int(setting.split("=")[1]) for setting in layout if "zero" not in setting and "layers" not in setting
    )
    assert together.world(pool, ranks, *layout) == [(0, "")] * ranks
    assert together.losses == pytest.approx(alone.losses, rel=1e-9)
