"""Training loops of Megatron-Core without flags: model, data, reduction and checkpoints."""

import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from hexad.compat.megatron import dist_checkpointing, distributed, parallel_state, samples, transformer
from hexad.compat.megatron.datasets import BlendedMegatronDatasetBuilder
from hexad.compat.megatron.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from hexad.compat.megatron.gpt import GPTModel
from hexad.compat.megatron.initialize import MegatronTokenizer, _NullTokenizer
from hexad.compat.megatron.schedules import forward_backward
from hexad.compat.megatron.settings import DistributedDataParallelConfig
from hexad.compat.megatron.tensor_parallel import model_parallel_cuda_manual_seed
from hexad.config import HexadError
from hexad.dataset.indexed import IndexedWriter, dtype_for

from ... import forks
from ...layers import load_global
from ...pool import Pool
from .core import core_config
from .test_gpt import core_on_cpu, global_tensors

S, BATCH, VOCAB, STEPS = 16, 4, 100, 3


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
CONFIG = {**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_func": gelu}
LLAMA = {
    **CONFIG,
    "num_query_groups": 2,
    "ffn_hidden_size": 40,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
}


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, S + 1), generator=torch.Generator().manual_seed(0))


def _core_steps(llama: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Initial weights of megatron-core's model, and the losses of steps of Adam."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    with core_on_cpu() as kind:
        torch.manual_seed(1)
        sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 40 if llama else 256}
        config = core_config(llama, params_dtype=torch.float64, pipeline_dtype=torch.float64, **sizes)
        spec = get_gpt_layer_local_spec(normalization=config.normalization)
        rope = {"position_embedding_type": "rope"} if llama else {}
        model = kind(config, spec, vocab_size=VOCAB, max_sequence_length=S, **rope).double()
        weights = {
            n: v.clone() for n, v in global_tensors(model.state_dict(), llama).items() if v is not None
        }
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
        mask = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
        for _ in range(STEPS):
            rows = tokens()
            optimizer.zero_grad()
            places = torch.arange(S).expand(BATCH, -1)
            loss = model(rows[:, :-1], places, mask, labels=rows[:, 1:]).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return weights, losses


class World:
    """``parallel_state`` of some degrees in the pool's world."""

    def __init__(self, tensor: int = 1, pipeline: int = 1, virtual: int | None = None) -> None:
        self._degrees = tensor, pipeline, virtual

    def __enter__(self) -> None:
        self._joined = dist.is_initialized()
        if not self._joined:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(*self._degrees, device=torch.device("cpu"))

    def __exit__(self, *_: object) -> None:
        parallel_state.destroy_model_parallel()
        if not self._joined:
            dist.destroy_process_group()


def build(settings: dict[str, Any], **more: Any) -> Any:
    """This rank's stages of a model without flags, in a list where there are several."""
    config = transformer.TransformerConfig(**{"params_dtype": torch.float64, **settings})
    rope = {"position_embedding_type": "rope"} if config.gated_linear_unit else {}
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    spec = transformer.get_gpt_layer_local_spec()
    stages = [
        GPTModel(config, spec, VOCAB, S, vp_stage=number, **rope, **more) for number in range(virtual or 1)
    ]
    return stages if virtual else stages[0]


def forward_step(rows: Iterator[torch.Tensor], model: Any) -> Any:
    batch = next(rows)
    places = torch.arange(S).expand(len(batch), -1)
    labels = batch[:, 1:] if distributed.unwrapped(model).post_process else None
    output = model(batch[:, :-1], places, None, labels=labels)
    return output, lambda losses: (losses.mean(), {"lm loss": losses.mean().item()})


def rows_of(micro: int) -> list[torch.Tensor]:
    """This data rank's microbatches."""
    data, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return list(tokens().split(micro))[data::ranks]


def _our_steps(
    settings: dict[str, Any],
    weights: dict[str, torch.Tensor] | None,
    degrees: dict[str, int],
    micro: int,
    tied: bool = False,
) -> list[float]:
    """Losses of the same steps on this rank's data ranks; empty but on the last stage."""
    with World(**degrees):
        model_parallel_cuda_manual_seed(3)
        built = build(settings, share_embeddings_and_output_weights=tied)
        chunks = built if isinstance(built, list) else [built]
        for chunk in chunks if weights is not None else ():
            load_global(chunk, weights)
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=micro == 1)
        wrapped = [distributed.DistributedDataParallel(c.config, ddp, c, bool(micro == 2)) for c in chunks]
        parameters = [parameter for chunk in wrapped for parameter in chunk.parameters()]
        optimizer, losses = torch.optim.Adam(parameters, lr=1e-2), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            batches = rows_of(micro)
            reported = forward_backward(
                forward_step_func=forward_step,
                data_iterator=[iter(batches) for _ in wrapped],
                model=wrapped if isinstance(built, list) else wrapped[0],
                num_microbatches=len(batches),
                seq_length=S,
                micro_batch_size=micro,
            )
            distributed.finalize_model_grads(wrapped)
            optimizer.step()
            losses += [sum(row["lm loss"] for row in reported) / len(reported)] if reported else []
        return losses


def mean_over_data(results: list[list[float]], ranks: int) -> list[float]:
    """The losses of all data ranks; every rank of a last stage has those of one."""
    found = np.array([losses for losses in results if losses])
    assert len(found) >= ranks
    return list(found.mean(axis=0))


LAYOUTS: list[tuple[dict[str, int], int, dict[str, Any], int]] = [
    # degrees, ranks, settings, sequences of a microbatch
    ({"tensor": 2}, 4, {"sequence_parallel": True}, 1),
    ({"pipeline": 2}, 4, {}, 1),
    ({"pipeline": 2, "virtual": 2}, 2, {"num_layers": 4}, 2),
    ({"tensor": 2}, 2, {}, BATCH),
]


@pytest.mark.slow
@pytest.mark.parametrize("llama", [False, True], ids=["gpt", "llama"])
def test_losses_of_a_loop_are_megatron_cores(pool: Pool, llama: bool) -> None:
    pytest.importorskip("megatron.core")
    ((weights, losses),) = pool.run(1, _core_steps, llama)
    for degrees, ranks, more, micro in (*LAYOUTS[:2], ({"tensor": 4}, 4, {}, BATCH)):
        settings = {**(LLAMA if llama else CONFIG), **more}
        results = pool.run(ranks, _our_steps, settings, weights, degrees, micro)
        # megatron-core computes the loss and rotary factors in float32.
        assert mean_over_data(results, 1) == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("degrees", "ranks", "more", "micro"),
    [
        pytest.param(*layout, marks=pytest.mark.slow) if "virtual" in layout[0] else layout
        for layout in LAYOUTS  # test_gpt.py interleaves stages too
    ],
)
def test_losses_of_a_loop_are_one_ranks(
    pool: Pool, degrees: dict[str, int], ranks: int, more: dict[str, Any], micro: int
) -> None:
    """With tied embeddings; with dropout where microbatches are the same."""
    dropout = 0.1 if micro == BATCH else 0.0
    settings = {**CONFIG, "hidden_dropout": dropout, "attention_dropout": dropout, **more}
    alone = {**settings, "sequence_parallel": False}
    (losses,) = pool.run(1, _our_steps, alone, None, {}, BATCH, True)
    results = pool.run(ranks, _our_steps, settings, None, degrees, micro, True)
    assert mean_over_data(results, 1) == pytest.approx(losses, rel=1e-9)
    assert losses[-1] < losses[0]


def _saved(directory: str, degrees: dict[str, int]) -> list[list[int]]:
    """Save a model, with what a script adds, and load it into a model of other values."""
    with World(**degrees):
        model_parallel_cuda_manual_seed(3)
        wrapped = distributed.DistributedDataParallel(None, None, build(CONFIG))
        rank = dist.get_rank()
        state = {
            "model": wrapped.sharded_state_dict(prefix="language."),
            "iteration": 7,
            "args": {"rate": 0.5, "names": ["a", {"b": 1}]},
            "rng": ShardedObject("rng", [rank, rank + 1], (dist.get_world_size(),), (rank,)),
            "local": LocalNonpersistentObject(rank),
        }
        dist_checkpointing.save(state, directory)
        loaded = dist_checkpointing.load(state, directory)
        assert (loaded["iteration"], loaded["args"], loaded["local"]) == (7, state["args"], rank)
        assert loaded["model"].keys() == {f"language.{name}" for name in wrapped.module.state_dict()}
        return [loaded["rng"]]


def _loaded(directory: str, degrees: dict[str, int], seed: int) -> list[float]:
    """Losses of a model of this seed, and with the values of the checkpoint."""
    with World(**degrees):
        model_parallel_cuda_manual_seed(seed)
        model = build(CONFIG)
        losses = []
        for _ in range(2):
            reported = forward_backward(
                forward_step_func=forward_step,
                data_iterator=iter([tokens()]),
                model=model,
                num_microbatches=1,
                seq_length=S,
                micro_batch_size=BATCH,
                forward_only=True,
            )
            losses += [row["lm loss"] for row in reported]
            state = dist_checkpointing.load(model.sharded_state_dict(prefix="language."), directory)
            model.load_state_dict(
                {name.removeprefix("language."): state[name] for name in state if "." in name}
            )
        assert all(parameter.grad is None for parameter in model.parameters())
        return losses


def test_checkpoints_have_no_layout(pool: Pool, tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    assert pool.run(2, _saved, directory, {"tensor": 2}) == [[[0, 1]], [[1, 2]]]
    ((_, wanted),) = pool.run(1, _loaded, directory, {}, 3)
    first, second = pool.run(2, _loaded, directory, {"pipeline": 2}, 4)
    assert (
        first == [] and second[0] != pytest.approx(wanted) and second[1] == pytest.approx(wanted, rel=1e-12)
    )
    assert pool.run(2, _saved, directory, {"pipeline": 2}) == [[[0, 1]], [[1, 2]]]  # in its place
    assert dist_checkpointing.load_common_state_dict(directory)["iteration"] == 7
    assert dist_checkpointing.check_is_distributed_checkpoint(directory)


def _refused_directories(directory: str) -> list[str]:
    messages = []
    folder = Path(directory)
    (folder / "own").mkdir()
    (folder / "own" / "file").write_text("")
    (folder / "core").mkdir()
    (folder / "core" / "metadata.json").write_text("{}")
    with World():
        state = {"a": ShardedTensor.from_rank_offsets("a", torch.ones(2, 3), (0, 0, 1))}
        for call in (
            lambda: dist_checkpointing.save(state, folder / "own"),
            lambda: dist_checkpointing.load(state, folder / "core"),
            lambda: dist_checkpointing.load(state, folder / "none"),
        ):
            with pytest.raises(HexadError) as error:
                call()
            messages.append(str(error.value))
    return messages


def test_directories_that_hold_something_else_are_refused(pool: Pool, tmp_path: Path) -> None:
    (messages,) = pool.run(1, _refused_directories, str(tmp_path))
    words = ("own holds other files", "hexad checkpoint import --from megatron:", "none: found no checkpoint")
    assert all(word in message for word, message in zip(words, messages, strict=True)), messages


def _wrong_shards(directory: str) -> tuple[list[str], str]:
    """Messages about sharded tensors that do not fit, and what is printed of values that differ."""
    messages, rank, shard = [], dist.get_rank(), torch.ones(2, 3)
    with World():
        part, save = ShardedTensor.from_rank_offsets, dist_checkpointing.save
        for call in (
            lambda: part("a", shard, (0, 2, 2)),
            lambda: part("a", shard, (2, 0, 2)),
            lambda: save({"a": part("a", shard)}, f"{directory}/twice"),
            lambda: save({"a": part("a", shard, (0, 0, 2), replica_id=rank)}, f"{directory}/gap"),
        ):
            with pytest.raises(HexadError) as error:
                call()
            messages.append(str(error.value))
        own = {"scale": shard * rank, "same": shard, "list": [1, rank], **({"more": 1} if rank else {})}
        with redirect_stderr(StringIO()) as printed:
            save({"own": own, "step": 3}, f"{directory}/own")
        assert dist_checkpointing.load({}, f"{directory}/own")["own"]["list"] == [1, 0]
    return messages, printed.getvalue()


def test_shards_that_do_not_fit_and_values_that_differ(pool: Pool, tmp_path: Path) -> None:
    (messages, printed), (others, silent) = pool.run(2, _wrong_shards, str(tmp_path))
    wanted = ["a: found part 2 of 2 along dim 0", "a: found part 0 of 2 along dim 2"]
    wanted += ["found 12 values, expected 6; every", "found 6 values, expected 12; every"]
    assert [m for m, part in zip(messages, wanted, strict=True) if part not in m] == []
    assert messages == others and silent == ""
    assert "found other values of own.list.1, own.more, own.scale on other ranks" in printed


def _accumulated() -> None:
    """Gradients add up as the script's ``zero_grad`` says."""
    with World():
        model_parallel_cuda_manual_seed(3)
        model = distributed.DistributedDataParallel(None, DistributedDataParallelConfig(), build(CONFIG))
        parameters: list[Any] = list(model.parameters())

        def passed() -> None:
            model(tokens()[:, :-1], None, None, labels=tokens()[:, 1:]).mean().backward()

        def gradient() -> torch.Tensor:
            model.finish_grad_sync()
            assert all(torch.equal(p.grad, p.main_grad) for p in parameters)
            return torch.cat([parameter.grad.flatten() for parameter in parameters])

        passed()
        assert all(parameter.grad is None for parameter in parameters)
        once = gradient().clone()
        assert once.abs().sum() > 0
        passed()  # without zero_grad, as with torch
        torch.testing.assert_close(gradient(), 2 * once)
        for discard in (model.zero_grad_buffer, model.zero_grad, lambda: model.zero_grad(set_to_none=False)):
            discard()
            with model.no_sync():
                passed()
            passed()
            torch.testing.assert_close(gradient(), 2 * once)
        model.scale_gradients(0.5)
        torch.testing.assert_close(torch.cat([p.grad.flatten() for p in parameters]), once)
        plain = build(CONFIG)
        plain.load_state_dict(model.state_dict())
        plain(tokens()[:, :-1], None, None, labels=tokens()[:, 1:]).mean().backward()
        torch.testing.assert_close(torch.cat([p.grad.flatten() for p in plain.parameters()]), once)


def _discarded() -> None:
    """Gradients in another format than the parameters', of which the script discards some."""
    settings = {**CONFIG, "num_layers": 1, "params_dtype": torch.bfloat16, "bf16": True}
    with World():
        model_parallel_cuda_manual_seed(3)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        model = distributed.DistributedDataParallel(None, ddp, build(settings))
        parameters: list[Any] = list(model.parameters())

        def gradients() -> list[torch.Tensor]:
            model(tokens()[:, :-1], None, None, labels=tokens()[:, 1:]).mean().backward()
            model.finish_grad_sync()
            return [parameter.main_grad.clone() for parameter in parameters]

        once = gradients()
        assert once[0].dtype == torch.float32
        optimizers = [torch.optim.SGD(half, lr=0.0) for half in (parameters[::2], parameters[1::2])]
        for to_none in (True, False):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=to_none)
            torch.testing.assert_close(gradients(), once)
            optimizers[0].zero_grad(set_to_none=to_none)
            twice = [(1 + number % 2) * gradient for number, gradient in enumerate(once)]
            torch.testing.assert_close(gradients(), twice)


def test_gradients_add_up_until_they_are_discarded(pool: Pool) -> None:
    pool.run(1, _accumulated)
    pool.run(1, _discarded)


def dataset_config(**more: Any) -> dict[str, Any]:
    return {"random_seed": 5, "sequence_length": 33, "mid_level_dataset_surplus": 0.005, **more}


OPTIONS = [(False, False, False), (True, True, True)]
"""``reset_position_ids``, ``reset_attention_mask``, ``eod_mask_loss``."""


def _core_samples(
    more: dict[str, Any], cls: str, sizes: list[int | None], options: tuple[bool, ...]
) -> list[int | None]:
    """Lengths of megatron-core's data sets, and some samples."""
    from megatron.core.datasets import blended_megatron_dataset_builder as builder
    from megatron.core.datasets import gpt_dataset

    names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    tokenizer = SimpleNamespace(vocab_size=65, eod=64, pad=-1, unique_identifiers={"class": "numbers"})
    settings = dataset_config(tokenizer=tokenizer, **dict(zip(names, options)), **more)
    config = gpt_dataset.GPTDatasetConfig(**settings)
    made = builder.BlendedMegatronDatasetBuilder(getattr(gpt_dataset, cls), sizes, lambda: True, config)
    ours = BlendedMegatronDatasetBuilder(
        getattr(samples, cls), sizes, lambda: True, samples.GPTDatasetConfig(**settings)
    )
    pairs = list(zip(made.build(), ours.build(), strict=True))
    for theirs, mine in pairs:
        if mine is None:
            assert theirs is None
            continue
        assert len(theirs) == len(mine)
        for number in {*range(min(6, len(mine))), len(mine) // 2, len(mine) - 1}:
            one, other = theirs[number], mine[number]
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), (number, name)
    return [mine and len(mine) for _, mine in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_samples_are_megatron_cores(pool: Pool, tmp_path: Path, options: tuple[bool, ...]) -> None:
    """Of one epoch, and of several, whose last one is shuffled by itself or not."""
    pytest.importorskip("megatron.core")
    draw, prefixes = np.random.default_rng(1), [str(tmp_path / f"data{number}") for number in range(3)]
    for prefix, documents in zip(prefixes, (60, 90, 30)):
        with IndexedWriter(prefix, dtype_for(65)) as writer:
            for length in draw.integers(1, 90, documents):
                writer.add_document(np.append(draw.integers(0, 64, length - 1), 64))
    first = {"blend": (prefixes[:1], None), "split": "70,20,10"}
    for sizes in ([100, None, 5], [None, 40, None], [137, 1, 3], [185, 90, 9]):
        assert pool.run(1, _core_samples, first, "GPTDataset", sizes, options)
    assert pool.run(1, _core_samples, {}, "MockGPTDataset", [1000, None, None], options)
    weighted = {"blend": (prefixes, [0.5, 0.2, 0.3]), "split": "80,20"}
    assert pool.run(1, _core_samples, weighted, "GPTDataset", [101, 13, 0], options)
    assert pool.run(
        1, _core_samples, {**weighted, "blend": (prefixes[:1], [2.0])}, "GPTDataset", [50, 5, 0], options
    )
    for sizes in ([None, None, None], [60, 1000, None]):
        plain = {"blend": (prefixes, None), "split": "60,30,10"}
        assert pool.run(1, _core_samples, plain, "GPTDataset", sizes, options)
    separate = {"blend_per_split": [(prefixes[:2], [3.0, 1.0]), (prefixes[2:], None), None]}
    assert pool.run(1, _core_samples, separate, "GPTDataset", [77, 7, 0], options)


def test_samples_cover_an_epoch(tmp_path: Path) -> None:
    """Every token but those of the remainder is an input once."""
    prefix = str(tmp_path / "data")
    with IndexedWriter(prefix, dtype_for(1000)) as writer:
        for first in range(0, 500, 10):
            writer.add_document(np.arange(first, first + 10))
    config = dataset_config(tokenizer=_NullTokenizer(999), blend=([prefix], None), split="80,20")
    built = BlendedMegatronDatasetBuilder(
        samples.GPTDataset, [None, 40, 1], lambda: True, samples.GPTDatasetConfig(**config)
    ).build()
    assert [None if part is None else len(part) for part in built] == [12, 42, None]
    inputs = torch.cat([built[0][number]["tokens"] for number in range(12)])
    assert len(inputs.unique()) == len(inputs) == 12 * 33 and int(inputs.max()) < 400
    sample = built[1][0]
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1]) and int(sample["tokens"].min()) >= 400
    with pytest.raises(HexadError, match="weights of a blend without a number of samples for train"):
        config = {**config, "blend": ([prefix, prefix], [1.0, 2.0])}
        samples.build_datasets(samples.GPTDataset, [None] * 3, lambda: True, SimpleNamespace(**config))
    with pytest.raises(HexadError, match="found split '0,0'"):
        samples.split_bounds("0,0")


def test_tokenizers_of_numbers() -> None:
    """Since core_v0.18 the size includes the end of a document."""
    newer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=64)
    older = _NullTokenizer(64)
    assert (newer.vocab_size, newer.eod, older.vocab_size, older.eod) == (64, 63, 65, 64)
    assert MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"}).tokenize("a") == [97]
    with pytest.raises(HexadError, match="found the library 'spam'; use one of huggingface"):
        MegatronTokenizer.from_pretrained(metadata_path={"library": "spam"})
    with pytest.raises(HexadError, match="pass metadata_path"):
        MegatronTokenizer.from_pretrained("nowhere")


def printed(folder: Path, ranks: int, *words: str) -> list[float]:
    """The losses that the script prints."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "hexad.compat.megatron", str(Path(__file__).parent / "core_loop_script.py"), *words]
    done = forks.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]


def test_a_script_without_flags_runs_unchanged(tmp_path: Path) -> None:
    losses = printed(tmp_path / "one", 1, "1", "1", "4")
    assert len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.slow
def test_a_script_without_flags_in_layouts(tmp_path: Path) -> None:
    """With Megatron-Core's dropout."""
    losses = printed(tmp_path / "one", 1, "1", "1", "4")
    for name, layout in (("tensor", ("2", "1")), ("pipeline", ("1", "2"))):
        assert printed(tmp_path / name, 2, *layout, "4") == pytest.approx(losses, rel=1e-5)
