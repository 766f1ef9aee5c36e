"""Low-rank adapters and frozen weights: peft's numbers, checkpoints without the base, exports; what is frozen
stays as it is."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml

import hexad
from hexad.checkpoint.base import Base, base_of, removal_notice
from hexad.checkpoint.directory import check_same_model
from hexad.checkpoint.manifest import read_manifest
from hexad.checkpoint.merged import StoredWeights, _merged
from hexad.checkpoint.reader import Checkpoint
from hexad.config import ConfigError, HexadError
from hexad.dataset.load.loader import loader_from_config
from hexad.dataset.load.microbatch import Microbatch
from hexad.dataset.text.tokenizer import ByteTokenizer
from hexad.engine.engine import Engine
from hexad.model.configuration import build_config
from hexad.model.families import family
from hexad.planning import resolve
from hexad.planning.costs import flops_per_token, parameter_count, trained_count
from hexad.planning.memory import per_pipeline_rank
from hexad.topology.layout import Layout
from hexad.topology.mesh import Mesh
from hexad.training.saves import Saves

from ..checkpoint import hugging_face as theirs
from ..checkpoint.test_hugging_face import convert, logits, refused
from ..pool import Pool
from ..small import microbatch_of
from .command import RunFile, call, write_run

STEPS, LR = 3, 0.01


def adapted(source: Path, targets: Any, precision: dict[str, Any] | None = None, **lora: Any) -> Engine:
    """An engine with the weights of a Hugging Face directory and adapters that already do something; in
    float64, unless a precision is given."""
    config = build_config(
        {
            "run": {"steps": 9},
            "model": {"load": f"hf:{source}", "lora": {"rank": 3, "alpha": 7.0, "targets": targets, **lora}},
            "data": {"sequence": 16},
            "batch": {"micro": 3, "global": 3},
            "precision": precision or {"dtype": "fp64"},
            "optimizer": {"lr": LR, "clip": 0.05, "eps": 1e-4},
            "lr_schedule": {"kind": "constant", "warmup": 0},
        }
    )
    from hexad.checkpoint.base import load_weights

    mesh = Mesh.create(Layout(world=1), torch.device("cpu"))
    engine = Engine(config, mesh)
    load_weights(engine.config, str(config.model.load), engine.weights(), mesh.world)
    generator = torch.Generator().manual_seed(5)
    for chunk in engine.chunks():
        if ".lora_b" in chunk.name and chunk.name.startswith("model."):
            chunk.tensor.copy_(torch.randn(chunk.tensor.shape, generator=generator, dtype=torch.float64) / 9)
    engine.publish()
    return engine


def random_batch(generator: torch.Generator) -> Microbatch:
    tokens = torch.randint(0, theirs.VOCAB, (3, 17), generator=generator)
    return microbatch_of(tokens)


def adapters_of(engine: Engine) -> dict[str, torch.Tensor]:
    """By our names: ``layers.0.attention.q.lora_a``."""
    return {
        chunk.name.removeprefix("model."): chunk.tensor.clone()
        for chunk in engine.chunks()
        if chunk.name.startswith("model.") and ".lora_" in chunk.name
    }


def in_peft(source: Path, targets: list[str], kind: str, adapters: dict[str, torch.Tensor]) -> Any:
    """peft's model with these adapters."""
    settings = peft.LoraConfig(r=3, lora_alpha=7.0, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(theirs.load(source), settings)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in adapters.items():
            module, _, half = name.rpartition(".")
            letter = half.removeprefix("lora_").upper()
            parameter = parameters[
                f"base_model.model.{family(kind).published(module)}.lora_{letter}.default.weight"
            ]
            parameter.data = values.clone()
    return model


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama, tied, llama3 rope", "all"),
        pytest.param("qwen2", ["q_proj", "v_proj", "down_proj"], marks=pytest.mark.slow),
        pytest.param(
            "deepseek_v3",
            ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_are_those_of_peft(name: str, targets: Any, tmp_path: Path) -> None:
    source = theirs.save(name, tmp_path / "hf", torch.float64)
    engine = adapted(source, targets)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = in_peft(
        source, linear if targets == "all" else targets, theirs.MODELS[name][0], adapters_of(engine)
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == trained_count(engine.config.model)
    optimizer = torch.optim.AdamW(trained, LR, (0.9, 0.95), 1e-4, 0.1)
    generator = torch.Generator().manual_seed(0)
    with theirs.exact_functions():
        for _ in range(STEPS):
            compare_step(engine, model, optimizer, trained, random_batch(generator))


def test_adapters_of_experts_are_merged_rectangle_by_rectangle() -> None:
    config = build_config(
        {"model": {"moe": {"experts": 4}, "lora": {"rank": 2, "alpha": 3.0, "targets": ["experts.*"]}}}
    )
    generator = torch.Generator().manual_seed(3)
    for shape in ((4, 2, 6, 5), (4, 5, 6)):
        shapes = {"x": shape, "x.lora_a": (4, 2, shape[-1]), "x.lora_b": (*shape[:-1], 2)}
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

        def read(name: str, offset: Any, sizes: Any, tensors: Any = tensors) -> torch.Tensor:
            return tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, sizes))]

        facts = {name: (torch.float32, shape) for name, shape in shapes.items()}
        base = StoredWeights("base", False, {"x": facts["x"]}, read)
        own = StoredWeights("own", False, {name: facts[name] for name in facts if name != "x"}, read)
        added = 1.5 * torch.einsum("e...r,eri->e...i", tensors["x.lora_b"], tensors["x.lora_a"])
        whole = tensors["x"] + added
        offset, sizes = (1, *(1 for _ in shape[1:])), (2, *(n - 1 for n in shape[1:]))
        part = whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes))]
        torch.testing.assert_close(_merged(own, base, config).read("x", offset, sizes), part)


def compare_step(
    engine: Engine, model: Any, optimizer: torch.optim.Optimizer, trained: list[Any], batch: Microbatch
) -> None:
    """A step of both, with clipping."""
    result = engine.train_step([batch])
    logits = model(batch.tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.get_total_norm(parameter.grad for parameter in trained)
    for weight in trained:
        weight.grad.mul_(0.05 / norm)
    optimizer.step()
    assert result.loss == pytest.approx(loss.item(), rel=1e-9)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-9)
    assert norm > 0.05


EXPERT_STACKS = ("gate_up", "down")


def in_peft_by_experts(source: Path, adapters: dict[str, torch.Tensor]) -> Any:
    """peft's model with adapters of experts (``target_parameters``): a product of low rank for each."""
    names = [f"mlp.experts.{stack}_proj" for stack in EXPERT_STACKS]
    settings = peft.LoraConfig(r=3, lora_alpha=7.0, target_modules=[], target_parameters=names)
    model = peft.get_peft_model(theirs.load(source), settings)
    for wrapper in model.modules():
        if not isinstance(wrapper, peft.tuners.lora.layer.ParamWrapper):
            continue
        layer = next(n for n, m in model.named_modules() if m is wrapper).split("layers.")[1].split(".")[0]
        stack = wrapper.parameter_name.removesuffix("_proj")
        a, b = (adapters[f"layers.{layer}.ffn.experts.{stack}.lora_{half}"] for half in "ab")
        first, second = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
        b = b.flatten(1, -2)
        if first.shape[1] != a.shape[2]:  # peft takes the dims of the stack in their order
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        first.data = a.flatten(0, 1).clone()
        second.data = b.permute(1, 2, 0).flatten(1).clone()
    return model


def test_experts_have_the_losses_of_peft(tmp_path: Path) -> None:
    source = theirs.save("mixtral", tmp_path / "hf", torch.float64)
    engine = adapted(source, [f"experts.{stack}" for stack in EXPERT_STACKS])
    model = in_peft_by_experts(source, adapters_of(engine))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == trained_count(engine.config.model)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(trained, LR, (0.9, 0.95), 1e-4, 0.1)
    with theirs.exact_functions():
        for _ in range(STEPS):
            compare_step(engine, model, optimizer, trained, random_batch(generator))


def test_adapters_train_in_fp16(tmp_path: Path) -> None:
    """A loss scale that overflows is halved and nothing is updated; then losses and norms are those of fp32,
    and frozen weights stay bit for bit."""
    source = theirs.save("llama", tmp_path / "hf")
    scaled = {"dtype": "fp16", "loss_scale_initial": 2.0**40, "loss_scale_hysteresis": 1}
    half, single = adapted(source, "all", scaled), adapted(source, "all", {"dtype": "fp32"})
    frozen = [chunk.tensor.clone() for chunk in half.fixed()]
    assert frozen and {tensor.dtype for tensor in frozen} == {torch.float16}
    batch = random_batch(torch.Generator().manual_seed(0))
    first, losses, scales = adapters_of(half), [], [2.0**40]
    for _ in range(8):
        before = adapters_of(half)
        while (result := half.train_step([batch])).skipped:
            assert result.loss_scale == scales[-1] and result.fault is None
            scales.append(scales[-1] / 2)
            assert all(torch.equal(values, before[name]) for name, values in adapters_of(half).items())
        wanted = single.train_step([batch])
        losses.append(result.loss)
        assert result.loss_scale == scales[-1]
        assert result.loss == pytest.approx(wanted.loss, rel=1e-3)
        assert result.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-2)
    assert 2.0**8 < scales[-1] < 2.0**40 and losses[-1] < losses[0] - 0.1
    for chunk, values in zip(half.fixed(), frozen):
        assert torch.equal(chunk.tensor, values), chunk.name
    assert all(not torch.equal(values, first[name]) for name, values in adapters_of(half).items())


def lora_run(where: Path, data: str, source: Path, **lora: Any) -> RunFile:
    model = {"load": f"hf:{source}", "lora": {"rank": 2, "targets": ["q", "v", "ffn.down"], **lora}}
    groups = {"model": model, "data": {"tokenizer": "byte"}, "run": {"steps": 4}, "checkpoint": {"every": 2}}
    run = write_run(where, data, **groups)
    tree = yaml.safe_load(run.path.read_text())
    tree["model"] = model  # its sizes are the source's
    run.path.write_text(yaml.safe_dump(tree))
    return run


def test_a_run_saves_adapters_and_resumes_in_any_layout(tmp_path: Path, data: str, pool: Pool) -> None:
    source = theirs.save("qwen2", tmp_path / "hf", torch.float64)
    run = lora_run(tmp_path / "one", data, source, dropout=0.3)
    assert run.train().status == 0
    manifest = read_manifest(run.newest)
    assert all(".lora_" in name for name in manifest.tensors)
    assert manifest.progress["base"]["load"] == f"hf:{source}"
    kinds = {name.split(".")[0] for name in manifest.tensors}
    assert kinds == {"model", "optimizer"}
    other = lora_run(tmp_path / "two", data, source, dropout=0.3)
    assert (
        other.world(
            pool, 4, "run.steps=2", "parallel.tensor=2", "parallel.pipeline=2", "lr_schedule.decay_steps=40"
        )
        == [(0, "")] * 4
    )
    assert other.world(pool, 2, "parallel.zero=3") == [(0, "")] * 2
    assert other.losses == pytest.approx(run.losses, rel=1e-9)
    assert len(set(run.losses)) == 4


def test_a_loop_of_ones_own_trains_adapters_as_the_command_does(tmp_path: Path, data: str) -> None:
    source = theirs.save("llama", tmp_path / "hf", torch.float64)
    run, other = lora_run(tmp_path / "one", data, source), lora_run(tmp_path / "two", data, source)
    assert run.train().status == 0
    losses = []
    for steps in (2, 4):  # the second time from a checkpoint
        with hexad.launch(hexad.load_config(other.path)) as joined:
            engine = hexad.Engine(joined.resolved, joined.mesh, initialise=False)
            saves = Saves(joined, engine)
            with pytest.raises(HexadError, match="call begin first"):
                saves.save()
            saves.begin()
            with loader_from_config(joined.resolved.config, 0, 1, ByteTokenizer()) as loader:
                while engine.step < steps:
                    losses.append(engine.train_step(loader.step(engine.samples)).loss)
            saves.save()
            saves.close()
    assert losses == run.losses
    held_out = {"held out": data}
    assert hexad.evaluate(other.directory, held_out) == hexad.evaluate(run.directory, held_out)


def test_biases_of_trained_routers_are_saved_beside_adapters(tmp_path: Path, data: str) -> None:
    """They have no gradient, but change after each step: a run that is resumed equals one that is not."""
    experts = {"experts": 8, "top_k": 2, "ffn_hidden": 16, "score": "sigmoid", "bias_rate": 0.05}
    model = {"lora": {"rank": 2, "targets": ["q"]}, "train": ["router"], "moe": experts}
    lines = []
    for name, parts in (("whole", (4,)), ("resumed", (2, 4))):
        run = write_run(tmp_path / name, data, model=model, data={"tokenizer": "byte"})
        for steps in parts:
            assert run.train(f"run.steps={steps}").status == 0
        lines.append((run.directory / "experts.jsonl").read_text())
        held = read_manifest(run.newest).tensors
        assert "model.layers.0.ffn.router.bias" in held and "model.embedding.weight" not in held
    assert lines[0] == lines[1]


@pytest.mark.parametrize("zero", [0, 1])
def test_data_ranks_have_the_losses_and_adapters_of_one(
    zero: int, tmp_path: Path, data: str, pool: Pool
) -> None:
    """Where every rank holds complete gradients, and the optimizer's state of all adapters or of a half."""
    source = theirs.save("llama", tmp_path / "hf", torch.float64)
    runs = [lora_run(tmp_path / name, data, source, dropout=0.2) for name in ("alone", "two")]
    assert runs[0].train().status == 0
    assert runs[1].world(pool, 2, "parallel.data=2", f"parallel.zero={zero}") == [(0, "")] * 2
    for name in ("loss", "grad_norm"):
        wanted = [line[name] for line in runs[0].metrics]
        assert [line[name] for line in runs[1].metrics] == pytest.approx(wanted, rel=1e-9)
    with Checkpoint(runs[0].newest) as alone, Checkpoint(runs[1].newest) as two:
        assert alone.manifest.tensors.keys() == two.manifest.tensors.keys()
        for name in alone.manifest.tensors:
            torch.testing.assert_close(two.read(name), alone.read(name), rtol=1e-9, atol=1e-13)


def test_adapters_are_not_added_to_other_weights(tmp_path: Path, data: str) -> None:
    source = theirs.save("llama", tmp_path / "hf")
    run = lora_run(tmp_path / "run", data, source)
    assert run.train("run.steps=2").status == 0
    source.rename(tmp_path / "moved")
    theirs.save("llama", source, torch.float64)
    error = run.train().error
    assert (
        "model.load: found hf:" in error
        and "is not what the checkpoint's adapters were trained with" in error
    )
    assert "model.load" in refused("export", run.directory, tmp_path / "out")
    assert run.train(f"model.load=hf:{tmp_path / 'moved'}").status == 0
    assert (
        call("generate", str(run.directory), "--prompt", "a", f"model.load=hf:{tmp_path / 'moved'}").status
        == 0
    )
    convert("export", run.directory, tmp_path / "out", "--base", f"hf:{tmp_path / 'moved'}")
    # A run of adapters brings no complete weights.
    tree = yaml.safe_load(run.path.read_text())
    tree["model"] = {"load": str(run.directory)}
    tree["run"]["dir"] = str(tmp_path / "further")
    run.path.write_text(yaml.safe_dump(tree))
    assert "holds adapters, not complete weights" in run.train().error


_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "phi3")]


EXPORTED = {
    "deepseek_v3": ["q_down", "kv_down", "kv_up", "attention.out", "ffn.shared.*", "experts.gate_up"],
    "mixtral": ["q", "layers.0*experts.gate_up", "experts.down"],
    "qwen3_moe, some dense, biases, window": ["k", "ffn.down", "experts.down"],
}


@pytest.mark.parametrize("name", ["gpt2", *EXPORTED, *_SLOW])
def test_exports_compute_the_same(name: str, tmp_path: Path, data: str) -> None:
    """Merged, and in PEFT's format, where GPT-2 and Phi-3 have one adapter for query, key and value, and
    experts are parameters."""
    source = theirs.save(name, tmp_path / "hf", torch.float64)
    targets = {"targets": EXPORTED[name]} if name in EXPORTED else {}
    run = lora_run(tmp_path / "run", data, source, **targets)
    assert run.train("optimizer.lr=0.1").status == 0
    document = convert("export", run.directory, tmp_path / "merged")
    assert document["family"] == theirs.MODELS[name][0]
    convert("export", run.directory, tmp_path / "adapter", "--adapter")
    tokens = torch.randint(0, theirs.VOCAB, (3, 17), generator=torch.Generator().manual_seed(3))
    model = peft.PeftModel.from_pretrained(theirs.load(source), tmp_path / "adapter", torch_dtype="auto")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(source)
    with theirs.exact_functions(), torch.no_grad():
        plain = theirs.load(source)(tokens).logits
        wanted = theirs.load(tmp_path / "merged")(tokens).logits
        computed = model(tokens).logits
    ours = logits(run.directory, tokens)
    assert (wanted - plain).abs().max() > 1e-3
    torch.testing.assert_close(computed, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)


def test_exports_that_cannot_be_are_refused(tmp_path: Path, data: str) -> None:
    run = write_run(tmp_path / "plain", data, run={"steps": 1})
    assert run.train().status == 0
    assert "has no adapters" in refused("export", run.directory, tmp_path / "out", "--adapter")
    lora = {"lora": {"rank": 2}, "train": ["norm"]}
    run = write_run(tmp_path / "lora", data, run={"steps": 1}, model=lora)
    assert run.train().status == 0
    assert "belong to initial values" in refused("export", run.directory, tmp_path / "out")
    assert "has trained norm.weight besides" in refused(
        "export", run.directory, tmp_path / "out", "--adapter"
    )


def test_frozen_weights_stay_bit_for_bit(tmp_path: Path, data: str, pool: Pool) -> None:
    """Also in 16 bits with sharded state; they have no optimizer state, and nothing is sent for them."""
    groups = {"run": {"steps": 2}, "checkpoint": {"every": 1}, "precision": {"dtype": "bf16"}}
    sent, states = {}, {}
    for train in ("all", ["head", "*norm*"]):
        run = write_run(tmp_path / str(len(sent)), data, **groups, model={"train": train})
        assert run.world(pool, 2, "parallel.zero=2") == [(0, "")] * 2
        sent[len(sent)] = run.metrics[-1]["comm_bytes"]["data"]
        with Checkpoint(run.directory / "checkpoints/step-00000001") as one, Checkpoint(run.newest) as two:
            changed = {
                name
                for name in one.manifest.tensors
                if not torch.equal(one.read(name), two.read(name)) and name.startswith("model.")
            }
            states[len(states)] = {
                name for name in two.manifest.tensors if name.startswith("optimizer.exp_avg.")
            }
    assert changed == {
        "model.head.weight", "model.norm.weight",
        "model.layers.0.attention_norm.weight", "model.layers.0.ffn_norm.weight",
    }  # fmt: skip
    assert states[1] == {name.replace("model.", "optimizer.exp_avg.") for name in changed} < states[0]
    config = build_config({**yaml.safe_load((run.directory / "config.yaml").read_text())})
    # The few vectors that are left are rounded up to whole shares, and the loss's bytes stay.
    share = trained_count(config.model) / parameter_count(config.model)
    assert sent[1] / sent[0] == pytest.approx(share, rel=0.15)


def test_flops_without_weight_gradients() -> None:
    """Frozen matrices have two products of three, of adapters all count."""
    model: dict[str, Any] = {"vocab": 1000, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn_hidden": 128}
    full, lora = (
        build_config({"model": {**model, **more}}).model
        for more in ({}, {"lora": {"rank": 1, "targets": ["down"]}})
    )
    layer = 4 * 64 * 64 + 3 * 64 * 128
    matrices, adapters = 4 * layer + 64 * 1000, 4 * (64 + 128)
    assert flops_per_token(full, 32) - flops_per_token(lora, 32) == 2 * matrices - 6 * adapters
    assert trained_count(lora) == adapters


def test_what_cannot_be_selected_is_refused() -> None:
    mesh = Mesh.create(Layout(world=1), torch.device("cpu"))

    def error(**model: Any) -> str:
        with pytest.raises(ConfigError) as raised:
            Engine(build_config({"model": {"vocab": 9, **model}}), mesh)
        return str(raised.value)

    assert error(train=["norms"]).endswith("'norms', which matches no name (did you mean 'norm'?)")
    assert "model.train: found [], which trains nothing" in error(train=[])
    assert "selects layers.0.attention.q.weight but not layers.0.attention.k" in error(train=["q_proj"])
    assert "model.lora.targets: found 'lm_head', which" in error(lora={"targets": ["lm_head"]})
    assert error(train="norm").startswith("model.train: found 'norm', expected 'all' or [pattern, ...]")


def test_older_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    """Those of versions without adapters."""
    config = build_config({"model": {"vocab": 9, "lora": {"rank": 2}}})
    saved = config.model_dump(mode="json", by_alias=True)
    del saved["model"]["lora"], saved["model"]["train"]
    with pytest.raises(HexadError, match=r"model\.lora: found \{.*\}, but checkpoint .* has None"):
        check_same_model(tmp_path, saved, config)
    check_same_model(tmp_path, saved, build_config({"model": {"vocab": 9}}))


def test_settings_that_older_checkpoints_lack_are_their_defaults(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_positions": 8}
    config = build_config({"model": {"vocab": 9, "rope_scaling": scaling}})
    saved = config.model_dump(mode="json", by_alias=True)
    saved["model"]["rope_scaling"] = scaling
    check_same_model(tmp_path, saved, config)
    with pytest.raises(HexadError, match=r"^model\.rope_scaling: found "):
        check_same_model(tmp_path, {"model": {"rope_scaling": {**scaling, "factor": 5.0}}}, config)


def test_adapters_without_a_reference_are_refused(tmp_path: Path, data: str) -> None:
    run = write_run(tmp_path, data, run={"steps": 1}, model={"lora": {"rank": 2}})
    assert run.train().status == 0
    manifest = read_manifest(run.newest)
    without = replace(manifest, progress={"step": 1, "samples": 4})
    with pytest.raises(HexadError, match="holds adapters without a reference"):
        base_of(run.newest, without)
    assert base_of(run.newest, manifest).load is None


def test_a_moved_base_is_looked_for_where_it_is_said_to_be(tmp_path: Path) -> None:
    def source(saved: str, given: str | None) -> str | None:
        config = build_config({"model": {"vocab": 9}})
        config = config.model_copy(update={"model": config.model.model_copy(update={"load": given})})
        return Base(saved, "x").source(config)

    assert source("hf:/models/llama-8b", "hf:/models/llama") == "hf:/models/llama"
    assert source("/runs/a/checkpoints/step-00000001", "/runs/a") == "/runs/a/checkpoints/step-00000001"
    assert source("/runs/ab/checkpoints/step-00000001", "/runs/a") == "/runs/a"
    assert source("hf:/models/llama", None) == "hf:/models/llama"


def test_the_memory_of_a_stage_with_nothing_trained_is_planned() -> None:
    tree = {"model": {"vocab": 9, "train": ["layers.0"]}, "parallel": {"pipeline": 2}}
    tree |= {"precision": {"dtype": "bf16", "reduce": "bf16", "accumulate": "bf16"}}
    plans = per_pipeline_rank(resolve(build_config(tree), Layout(world=2, pipeline=2)))
    assert plans[0].optimizer > 0 == plans[1].optimizer


def test_a_base_that_its_run_may_remove_is_reported_and_can_be_a_copy(tmp_path: Path, data: str) -> None:
    groups = {"data": {"tokenizer": "byte"}, "checkpoint": {"every": 2, "keep": 1}}
    base = write_run(tmp_path / "base", data, run={"steps": 2}, **groups)
    assert base.train().status == 0
    used, copy = base.newest, tmp_path / "copy"
    lora = ("run.steps=2", "model.lora={rank: 2}", f"run.dir={tmp_path / 'lora'}")
    started = base.train(f"model.load={base.directory}", *lora)
    notice = f"the adapters need {used}, which run {base.directory} removes when it has 1 newer checkpoints"
    assert started.status == 0 and started.err.count(notice) == 1
    shutil.copytree(used, copy)
    assert base.train("run.steps=4").status == 0 and not used.exists()
    generate = ("generate", str(tmp_path / "lora"), "--prompt", "a", "--tokens", "2")
    assert call(*generate).status == 2
    assert call(*generate, f"model.load={copy}").status == 0
    # No run removes a copy or a published model; a resumed run does not repeat the warning.
    for load in (str(copy), f"hf:{tmp_path / 'hf'}"):
        assert removal_notice(Base(load, "")) is None
    resumed = base.train(f"model.load={copy}", *lora, "run.steps=4")
    assert resumed.status == 0 and "checkpoint.keep" not in resumed.err, resumed.err
