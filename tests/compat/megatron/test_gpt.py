"""``GPTModel`` against megatron-core's with the same weights, and its training in pipelines."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hexad.compat import megatron
from hexad.compat.megatron import parallel_state, transformer
from hexad.config import HexadError

from ...layers import load_global
from ...pool import Pool
from ...small import microbatch_of
from .core import core_config
from .test_initialize import script
from .test_translate import LLAMA, SMALL, without

S, B, VOCAB = 32, 3, 512  # with any number of tensor ranks
SIZES = [*without(SMALL, "--mock-data"), "--hidden-dropout", "0", "--attention-dropout", "0"]
SIZES += ["--distributed-backend", "gloo", "--micro-batch-size", "1", "--vocab-size", "511"]
GROUPED = [*LLAMA, "--group-query-attention", "--num-query-groups", "2"]
SINGLE = ["precision.dtype=fp64"]


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 300, (B, S), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def core_on_cpu() -> Iterator[Any]:
    """megatron-core in a world of one, without a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state as state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer import dot_product_attention as attention
    tracker = mock.Mock(fork=contextlib.nullcontext)
    cpu = torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: cpu),
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        mock.patch.object(attention.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker),
    ):
        state.initialize_model_parallel(create_gloo_process_groups=False)
        try:
            yield GPTModel
        finally:
            state.destroy_model_parallel()
            dist.destroy_process_group()


def core_model(kind: Any, llama: bool, biases: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = core_config(
        llama,
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128 if llama else 256,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        attention_softmax_in_fp32=False,
        add_bias_linear=biases,
    )
    torch.manual_seed(1)
    model = kind(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=VOCAB,
        max_sequence_length=S,
        position_embedding_type="rope" if llama else "learned_absolute",
        share_embeddings_and_output_weights=not llama,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and norms too
    return model.double()


def global_tensors(state: dict[str, Any], llama: bool) -> dict[str, torch.Tensor]:
    """megatron-core's weights by Hexad's names."""
    groups, width, queries = (2, 16, 2) if llama else (4, 16, 1)
    names = {
        "embedding.word_embeddings.weight": "embedding.weight",
        "embedding.position_embeddings.weight": "positions.weight",
        "output_layer.weight": "head.weight",
    }
    weights = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        name = names.get(name, name.removeprefix("decoder."))
        for theirs, ours in (
            ("final_layernorm", "norm"),
            ("input_layernorm", "attention_norm"),
            ("pre_mlp_layernorm", "ffn_norm"),
            ("self_attention.linear_proj", "attention.out"),
            ("mlp.linear_fc2", "ffn.down"),
        ):
            name = name.replace(theirs, ours)
        end = name.rpartition(".")[2]
        if "linear_qkv" in name:
            parts = value.unflatten(0, (groups, queries + 2, width)).split([queries, 1, 1], dim=1)
            layer = name.split(".self_attention")[0]
            weights |= {f"{layer}.attention.{q}.{end}": p.flatten(0, 2) for q, p in zip("qkv", parts)}
        elif "linear_fc1" in name:
            layer = name.split(".mlp")[0]
            halves = zip(("gate", "up"), value.chunk(2)) if llama else (("up", value),)
            weights |= {f"{layer}.ffn.{which}.{end}": part for which, part in halves}
        else:
            weights[name] = value
    return weights


def _core(
    llama: bool, biases: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights; losses, logits and the embedding's gradient of megatron-core."""
    with core_on_cpu() as kind:
        model = core_model(kind, llama, biases)
        weights = {name: value for name, value in model.state_dict().items() if value is not None}
        mask = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
        inputs = (tokens(), torch.arange(S).expand(B, -1), mask)
        losses = model(*inputs, labels=tokens(1))
        losses.square().sum().backward()
        gradient = model.embedding.word_embeddings.weight.grad
        logits = model(*inputs)
        named = {name: value.clone() for name, value in global_tensors(weights, llama).items()}
        return named, losses.detach(), logits.detach(), gradient


def _ours(
    llama: bool, biases: bool, tensor: int, sequence: bool, weights: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    line = [*SIZES, *(GROUPED if llama else ()), "--tensor-model-parallel-size", str(tensor)]
    line = [word for word in line if word != "--disable-bias-linear"]
    line += ["--ffn-hidden-size", "128"] if llama else []
    line += [] if biases else ["--disable-bias-linear"]
    with script(*line, *(["--sequence-parallel"] if sequence else []), world=False, settings=SINGLE):
        assert megatron.get_args().padded_vocab_size == VOCAB
        model = megatron.GPTModel(parallel_output=False)
        load_global(model, weights)
        mask = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
        inputs = (tokens(), torch.arange(S).expand(B, -1), mask)
        losses = model(*inputs, labels=tokens(1))
        losses.square().sum().backward()
        assert model.embedding is not None
        gradient = model.embedding.weight.grad
        with torch.no_grad():
            logits = model(*inputs)
            model.parallel_output = False
        if dist.is_initialized() and not dist.get_world_size() > 1:
            dist.destroy_process_group()
        return losses.detach(), logits, gradient


@pytest.mark.parametrize(
    ("llama", "biases"),
    [(True, False), (False, True), (True, True), (False, False)],
    ids=["llama", "gpt", "llama with biases", "gpt without biases"],
)
def test_losses_are_megatron_cores(pool: Pool, llama: bool, biases: bool) -> None:
    """Losses, logits and the gradient of a custom loss, at tensor 1 and 2."""
    pytest.importorskip("megatron.core")
    ((weights, losses, logits, gradient),) = pool.run(1, _core, llama, biases)
    for tensor, sequence in ((1, False), (2, False), (2, True)):
        for rank, results in enumerate(pool.run(tensor, _ours, llama, biases, tensor, sequence, weights)):
            wanted = (losses, logits, gradient.chunk(tensor)[rank])
            for ours, theirs in zip(results, wanted):
                # megatron-core computes the loss and rotary factors in float32.
                torch.testing.assert_close(ours, theirs.double(), rtol=1e-5, atol=1e-5)


def forward_step(data_iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """A forward step as scripts write it: every stage reads its microbatch; the mean loss is reported."""
    batch = next(data_iterator)
    output = model(batch[:, :-1], None, None, labels=batch[:, 1:] if model.post_process else None)

    def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = losses.mean()
        return loss, {"lm loss": float(loss.detach())}

    return output, loss_function


def batches(step: int) -> list[torch.Tensor]:
    """The microbatches of this data rank in one step."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, 300, (8, S + 1), generator=generator)
    data = megatron.get_args().data_parallel_size
    return list(rows.split(1))[parallel_state.get_data_parallel_rank() :: data]


def _train(more: list[str], settings: list[str], world: int) -> tuple[list[float], list[float]]:
    """(losses of every step over the last stages, gradient norms), then of an evaluation."""
    line = [*SIZES, *GROUPED, "--lr-decay-style", "constant", *more]
    with script(*line, world=world == 1, settings=[*SINGLE, *settings]):
        engine = megatron.setup_model(megatron.GPTModel)
        forward_backward, stages = megatron.get_forward_backward_func(), len(engine.stages)
        losses, norms = [], []

        def run(step: int, forward_only: bool) -> float:
            reported = forward_backward(
                forward_step_func=forward_step,
                data_iterator=[iter(batches(step)) for _ in range(stages)],
                model=engine,
                num_microbatches=megatron.get_num_microbatches(),
                seq_length=S,
                micro_batch_size=1,
                forward_only=forward_only,
            )
            total = torch.tensor(sum(report["lm loss"] for report in reported), dtype=torch.float64)
            if world > 1:
                dist.all_reduce(total)
            return float(total) / 8 / parallel_state.get_tensor_model_parallel_world_size()

        for step in range(3):
            losses.append(run(step, False))
            engine.reduce()
            norms.append(engine.update(lr=1e-2))
        losses += [run(3, True), run(3, True)]
        assert losses[-1] == losses[-2]
        return losses, norms


def _by_the_language_model() -> tuple[list[float], list[float]]:
    """The same steps by Hexad's own engine: the model of the configuration, a mean over tokens, gradients
    clipped as in Megatron-Core (without its epsilon the losses differ by 7e-10)."""
    import hexad
    from hexad.engine.language import LanguageModel

    line = [*SIZES, *GROUPED, "--lr-decay-style", "constant", "--lr", "1e-2"]
    with script(*line, settings=SINGLE):
        from hexad.compat.megatron.gpt import resolved_model
        from hexad.compat.megatron.settings import MANNERS

        workload = LanguageModel(resolved_model(), megatron.get_mesh())
        workload.manners = MANNERS
        engine = hexad.Engine(workload, megatron.get_mesh())
        steps = []
        for step in range(3):
            rows = [microbatch_of(tokens) for tokens in batches(step)]
            steps.append(engine.train_step(rows))
        return [made.loss for made in steps], [made.grad_norm for made in steps]


LAYOUTS = [  # those after the first three are in the slow sweep
    (2, "--pipeline-model-parallel-size 2", ["parallel.schedule=zb_v", "parallel.virtual_stages=2"]),
    (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel", []),
    (2, "--use-torch-fsdp2", []),
    (2, "--pipeline-model-parallel-size 2", []),
    (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", []),
    (2, "--pipeline-model-parallel-size 2", ["parallel.schedule=zb_h1", "parallel.zero=2"]),
    (
        2,
        "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform",
        ["parallel.schedule=zb_h1"],
    ),
    (2, "--use-torch-fsdp2 --recompute-activations", []),
    (4, "--tensor-model-parallel-size 4 --use-distributed-optimizer", []),
]


@pytest.mark.parametrize(
    ("world", "more", "settings"),
    [
        layout if number < 3 else pytest.param(*layout, marks=pytest.mark.slow)
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_training(pool: Pool, world: int, more: str, settings: list[str]) -> None:
    """Losses and gradient norms are those of one rank."""
    ((losses, norms),) = pool.run(1, _train, [], [], 1)
    assert losses[2] < losses[0]
    for results in pool.run(world, _train, more.split(), settings, world):
        assert results[0] == pytest.approx(losses, rel=1e-9)
        assert results[1] == pytest.approx(norms, rel=1e-8)


def test_steps_are_those_of_the_language_model(pool: Pool) -> None:
    ((losses, norms),) = pool.run(1, _train, [], [], 1)
    ((own_losses, own_norms),) = pool.run(1, _by_the_language_model)
    assert losses[:3] == pytest.approx(own_losses, rel=1e-10) and norms == pytest.approx(own_norms, rel=1e-9)


def _tied(schedule: str) -> str:
    line = [*SIZES, "--pipeline-model-parallel-size", "2", "--normalization", "LayerNorm"]
    try:
        with script(*line, world=False, settings=[*SINGLE, *f"parallel.schedule={schedule}".split()]):
            engine = megatron.setup_model(megatron.GPTModel)
            megatron.get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches(0)),
                model=engine,
                num_microbatches=megatron.get_num_microbatches(),
            )
            engine.reduce()
            return f"{engine.update(lr=0.0):.10f}"
    except HexadError as error:
        return str(error)


def _refusals() -> list[str]:
    messages = []
    with script(*SIZES, *GROUPED, settings=SINGLE):
        for attempt in (
            lambda: megatron.GPTModel(num_tokentypes=2),
            lambda: megatron.GPTModel(post_process=False),
            lambda: megatron.GPTModel()(tokens(), None, torch.zeros(1, 1, S, S, dtype=torch.bool)),
            lambda: megatron.GPTModel()(tokens(), torch.zeros(B, S, dtype=torch.int64)),
        ):
            try:
                attempt()
            except HexadError as error:
                messages.append(str(error))
        megatron.GPTModel(final_layernorm=True, z_loss_strength=0.0)  # of forks: as the flags say
        with pytest.raises(TypeError, match="unexpected argument 'final_layernorm'"):
            megatron.GPTModel(final_layernorm=False)
    return messages


def _degree_of_the_file(size: int) -> str:
    from hexad.compat import deepspeed

    line = [*SIZES, *GROUPED, "--tensor-model-parallel-size", "2"]
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": size}}
    with script(*line, world=False):
        try:
            deepspeed.initialize(model=megatron.GPTModel(), config=config)
        except HexadError as error:
            return str(error)
    return "accepted"


def test_the_file_names_the_degree_of_the_model(pool: Pool) -> None:
    assert pool.run(2, _degree_of_the_file, 2) == ["accepted", "accepted"]
    assert all(
        "found 4, but the model is not divided so; use 2" in text
        for text in pool.run(2, _degree_of_the_file, 4)
    )


def test_tied_embeddings_and_refusals(pool: Pool) -> None:
    one, two = pool.run(2, _tied, "1f1b")
    assert one == two and float(one) > 0
    assert all("untie-embeddings" in text for text in pool.run(2, _tied, "zb_v"))
    assert all("ZeRO 3" in text for text in pool.run(2, _tied, "1f1b parallel.zero=3"))
    (messages,) = pool.run(1, _refusals)
    words = ("num_tokentypes", "expected True and True", "not causal", "--reset-position-ids")
    assert len(messages) == 4 and all(word in text for word, text in zip(words, messages)), messages


def _documents(isolated: bool) -> torch.Tensor:
    flags = ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"] if isolated else []
    with script(*SIZES, *GROUPED, *flags, settings=SINGLE):
        model, ids = megatron.GPTModel(), tokens()
        if isolated:
            places = torch.arange(S).expand(B, -1).clone()
            places[:, 20:] -= 20
            return model(ids, places, None, labels=ids)[:, 20:].detach()
        return model(ids[:, 20:], None, None, labels=ids[:, 20:]).detach()


def test_documents_are_isolated_by_positions(pool: Pool) -> None:
    """The second document has the losses of a separate sequence."""
    (losses,), (wanted,) = pool.run(1, _documents, True), pool.run(1, _documents, False)
    torch.testing.assert_close(losses, wanted, rtol=1e-10, atol=1e-10)


def _dropout() -> None:
    line = [*SIZES, *GROUPED, "--hidden-dropout", "0.5"]
    with script(*line, settings=SINGLE):
        model = megatron.GPTModel()
        one, two = model(tokens(), labels=tokens()), model(tokens(), labels=tokens())
        assert model.passes == 2 and not torch.equal(one, two)
        model.passes = 0
        assert torch.equal(one, model(tokens(), labels=tokens()))
        model.eval()
        assert torch.equal(model(tokens(), labels=tokens()), model(tokens(), labels=tokens()))


def test_dropout(pool: Pool) -> None:
    pool.run(1, _dropout)


def _resumed(directory: str) -> tuple[list[float], list[float]]:
    """Losses of the steps after a checkpoint, in the run that saved it and in one that loads it."""
    from hexad.compat import deepspeed

    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "optimizer": adam}
    with script(*SIZES, *GROUPED, "--hidden-dropout", "0.5"):
        one, two = (deepspeed.initialize(model=megatron.GPTModel(), config=config)[0] for _ in range(2))

        def losses(engine: Any) -> list[float]:
            continued = []
            for micro in range(4):
                loss = engine(tokens(micro)[:1], labels=tokens(micro + 1)[:1]).mean()
                engine.backward(loss)
                engine.step()
                continued.append(loss.item())
            return continued

        losses(one)
        one.save_checkpoint(directory)
        two.load_checkpoint(directory, load_optimizer_states=False)
        restored = [model.passes for model in (one.module, two.module)]
        two.load_checkpoint(directory)
        assert restored == [4, 4]
        return losses(one), losses(two)


def test_dropout_continues_after_resuming(pool: Pool, tmp_path: Path) -> None:
    ((uninterrupted, resumed),) = pool.run(1, _resumed, str(tmp_path))
    assert resumed == uninterrupted


def _steps_of_get_model(more: str) -> list[float]:
    """Losses of steps with an optimizer of torch, on the rank of the last stage."""
    from hexad.compat.megatron import distributed, training

    line = [*SIZES, *GROUPED, "--lr-decay-style", "constant", *more.split()]
    with script(*line, world=dist.is_initialized() and dist.get_world_size() == 1, settings=SINGLE):
        chunks = training.get_model(megatron.GPTModel, transformer.ModelType.encoder_or_decoder)
        assert training.unwrap_model(chunks)[0] is chunks[0].module
        assert training.get_model(megatron.GPTModel, wrap_with_ddp=False)[0].config.num_layers == 4
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        optimizer, losses = torch.optim.Adam(parameters, lr=1e-2), []
        for _ in range(2):
            optimizer.zero_grad()
            rows = batches(0)
            reported = megatron.get_forward_backward_func()(
                forward_step_func=_forward_of_chunk,
                data_iterator=[iter(rows) for _ in chunks],
                model=chunks,
                num_microbatches=len(rows),
                seq_length=S,
                micro_batch_size=1,
            )
            distributed.finalize_model_grads(chunks)
            optimizer.step()
            losses += [sum(row["lm loss"] for row in reported) / len(reported)] if reported else []
        return losses


def _forward_of_chunk(rows: Iterator[torch.Tensor], chunk: Any) -> tuple[torch.Tensor, Any]:
    batch, model = next(rows), chunk.module
    output = chunk(batch[:, :-1], None, None, labels=batch[:, 1:] if model.post_process else None)
    return output, lambda losses: (losses.mean(), {"lm loss": float(losses.mean().detach())})


def test_models_of_the_flags_with_an_optimizer_of_torch(pool: Pool) -> None:
    ((first, second),) = pool.run(1, _steps_of_get_model, "")
    more = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    (none, losses) = pool.run(2, _steps_of_get_model, more)
    assert none == [] and losses == pytest.approx([first, second], rel=1e-9) and second < first
