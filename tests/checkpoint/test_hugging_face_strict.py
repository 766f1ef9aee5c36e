"""Nothing of a published model is left unread, and nothing of ours unwritten, in every family."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from hexad.checkpoint.hugging_face import weights as reading
from hexad.checkpoint.hugging_face.exporting import export_model, saved_config
from hexad.checkpoint.hugging_face.names import published_tensors
from hexad.checkpoint.hugging_face.weights import HuggingFaceModel
from hexad.checkpoint.merged import opened_weights
from hexad.checkpoint.reader import Checkpoint
from hexad.checkpoint.tensor_file import Chunk
from hexad.config import HexadError
from hexad.config.model import ModelSettings
from hexad.model.configuration import build_config
from hexad.model.families import families, family
from hexad.model.hugging_face import model_settings, read_config
from hexad.model.inventory import ModelInventory
from hexad.parallel.rectangle import Rectangle

from . import hugging_face as theirs
from .test_hugging_face import convert, logits, refused, sequences

Tensors = dict[str, torch.Tensor]
NAMES = [next(name for name, (kind, _) in theirs.MODELS.items() if kind == family) for family in families()]
"""A model of every family."""
EXPERTS = ["mixtral", "qwen3_moe, one expert, tied", "deepseek_v3", "deepseek_v2, groups"]


def settings_of(directory: Path) -> ModelSettings:
    """Our settings of a model that transformers has saved."""
    tree = model_settings(read_config(directory), directory / "config.json")
    return build_config({"model": tree, "data": {"sequence": theirs.LENGTH}}).model


def rewritten(directory: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Put other tensors in place of a directory's."""
    for file in directory.glob("model*"):
        file.unlink()
    contiguous = {name: values.contiguous().clone() for name, values in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata or {"format": "pt"})


def opened(directory: Path) -> None:
    """Open a model's files, which checks the names, shapes and formats of all."""
    with HuggingFaceModel(directory, settings_of(directory)):
        pass


def without(tensors: Tensors, name: str, chance: Random) -> str:
    del tensors[name]
    return f"tensor {name} .* is missing"


def with_another(tensors: Tensors, name: str, chance: Random) -> str:
    number = chance.choice(["7", "98", "0.x"])
    other = re.sub(r"\d+", number, name) if re.search(r"\d", name) else f"{name}.{number}"
    tensors[other] = tensors[name].clone()
    return f"found tensor {other}, which"


def renamed(tensors: Tensors, name: str, chance: Random) -> str:
    at = chance.randrange(len(name))
    tensors[f"{name[:at]}x{name[at:]}"] = tensors.pop(name)
    return f"tensor {name} .* is missing"


def transposed(tensors: Tensors, name: str, chance: Random) -> str:
    dims = range(tensors[name].dim() - 1)
    turned = [tensors[name].transpose(dim, dim + 1) for dim in dims]
    turned = [values for values in turned if values.shape != tensors[name].shape]
    tensors[name] = turned[0] if turned else tensors[name][None]
    return f"tensor {name} has shape"


CHANGES: list[Callable[[Tensors, str, Random], str]] = [without, with_another, renamed, transposed]


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_tensor_is_refused(name: str, tmp_path: Path) -> None:
    """One of any family that is removed, added, renamed or transposed."""
    directory, chance = theirs.save(name, tmp_path / "hf"), Random(name)
    original = theirs.tensors(directory)
    rewritten(directory, original)
    opened(directory)
    for change in CHANGES * 3:
        tensors = dict(original)
        message = change(tensors, chance.choice(sorted(tensors)), chance)
        rewritten(directory, tensors)
        with pytest.raises(HexadError, match=message):
            opened(directory)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_one_place(name: str, tmp_path: Path) -> None:
    """Each of our values stands at one place of the published tensors, and every place has one; the names
    are those that transformers writes."""
    directory = theirs.save(name, tmp_path / "hf")
    original, model = theirs.tensors(directory), settings_of(directory)
    weights, places = ModelInventory(model).weights(), published_tensors(model)
    counts = {key: torch.zeros(values.shape, dtype=torch.int) for key, values in original.items()}
    for ours, place in places.items():
        assert place.shape == weights[ours].shape
        seen = torch.zeros(place.shape, dtype=torch.int)
        for part in place.forms[0]:
            assert counts[part.name].shape == part.stored_shape
            counts[part.name][part.place(part.part)] += 1
            seen[part.part.slices] += 1
        assert bool((seen == 1).all()), ours
    assert [key for key, count in counts.items() if not bool((count == 1).all())] == []
    assert places.keys() == weights.keys()


def test_names_that_do_not_make_up_the_model_are_refused(tmp_path: Path) -> None:
    """What a mistake in a family's names would leave out or write twice."""
    model = settings_of(theirs.save("qwen3_moe", tmp_path / "hf"))
    kind = family("qwen3_moe")
    gate, up = kind.experts["ffn.experts.gate_up"]
    for parts in ((gate,), (gate, gate), (up, "mlp.experts.0.up_proj.weight")):
        wrong = replace(kind, experts={**kind.experts, "ffn.experts.gate_up": parts})
        with pytest.raises((HexadError, IndexError), match=r"do not make it up|out of range"):
            published_tensors(model, wrong)


def test_what_a_checkpoint_has_besides_is_not_left_out(tmp_path: Path) -> None:
    source = theirs.save("llama", tmp_path / "hf")
    convert("import", source, tmp_path / "ours")
    with Checkpoint(tmp_path / "ours") as checkpoint:
        config = saved_config(checkpoint)
        with opened_weights(checkpoint, config) as weights:
            more = {**weights.tensors, "layers.0.ffn.extra": (torch.float32, (3,))}
            with pytest.raises(
                HexadError, match=r"found tensor model\.layers\.0\.ffn\.extra, which the model"
            ):
                export_model(replace(weights, tensors=more), config, tmp_path / "out", "auto", 10**9, [])
    assert not (tmp_path / "out").exists()


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    directory = theirs.save("llama", tmp_path / "hf")
    path = directory / "model.safetensors.index.json"
    places = json.loads(path.read_text())["weight_map"]
    first, last = (directory / places[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert first != last
    tensors = theirs.tensors(directory)
    held = {name: tensors[name] for name, file in places.items() if directory / file == last}
    save_file({**held, "model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}, last)
    with pytest.raises(HexadError, match=r"model\.embed_tokens\.weight is in another file of the model too"):
        opened(directory)


def test_files_of_other_frameworks_are_refused(tmp_path: Path) -> None:
    """Their matrices are transposed, which shapes do not show of square ones."""
    directory = theirs.save("llama", tmp_path / "hf")
    tensors = theirs.tensors(directory)
    for layout in ("tf", "flax", "x"):
        rewritten(directory, tensors, {"format": layout})
        assert f"found format '{layout}', whose matrices are" in refused("import", directory, tmp_path / "o")
    rewritten(directory, tensors, {"note": "no format"})
    opened(directory)


def stacked(name: str, directory: Path) -> Tensors:
    """The tensors of a model as transformers has them in memory."""
    return dict(theirs.load(directory).state_dict())


@pytest.mark.parametrize("name", EXPERTS)
def test_stacks_are_read_as_experts_one_by_one(name: str, tmp_path: Path) -> None:
    directory = theirs.save(name, tmp_path / "hf")
    one = HuggingFaceModel(directory, settings_of(directory))
    values = {ours: one.read(Rectangle.whole(ours, place.shape)) for ours, place in one.tensors.items()}
    tensors = stacked(name, directory)
    rewritten(directory, tensors)
    with one, HuggingFaceModel(directory, settings_of(directory)) as other:
        for ours, place in other.tensors.items():
            assert theirs.same(other.read(Rectangle.whole(ours, place.shape)), values[ours]), ours
    stack = next(key for key in tensors if key.endswith("experts.down_proj"))
    rewritten(directory, {**tensors, stack: tensors[stack].transpose(1, 2)})
    with pytest.raises(HexadError, match="has shape"):
        opened(directory)
    both = {**tensors, "model.layers.2.mlp.experts.0.down_proj.weight": tensors[stack][0]}
    rewritten(directory, both)
    with pytest.raises(HexadError, match="found tensor"):
        opened(directory)


def test_a_rank_reads_its_experts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = theirs.save("qwen3_moe", tmp_path / "hf", torch.float64)
    read: list[str] = []
    plain = HuggingFaceModel._slice

    def noted(self: HuggingFaceModel, name: str, place: Any) -> torch.Tensor:
        read.append(name)
        return plain(self, name, place)

    monkeypatch.setattr(HuggingFaceModel, "_slice", noted)
    with HuggingFaceModel(directory, settings_of(directory)) as model:
        shape = model.tensors["layers.1.ffn.experts.gate_up"].shape
        # Experts 4 and 5, half of their inner features, as expert and expert-tensor ranks hold them.
        rectangle = Rectangle("model.layers.1.ffn.experts.gate_up", shape, (4, 0, 10, 0), (2, 2, 10, 36))
        tensor = torch.zeros(rectangle.sizes, dtype=torch.float64)
        model.fill([Chunk(rectangle, tensor)])
    names = {f"model.layers.1.mlp.experts.{e}.{part}_proj.weight" for e in (4, 5) for part in ("gate", "up")}
    assert set(read) == names
    tensors = theirs.tensors(directory)
    for place, (expert, part) in {(0, 1): (4, "up"), (1, 0): (5, "gate")}.items():
        wanted = tensors[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"]
        assert theirs.same(tensor[place], wanted[10:])


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt2"])
def test_no_more_than_a_slice_is_in_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On import and export, whatever the number of experts; the values are the same."""
    source, most = theirs.save(name, tmp_path / "hf"), 2000
    sizes: list[int] = []
    plain, of_checkpoint = HuggingFaceModel.read, Checkpoint.read

    def noted(self: HuggingFaceModel, rectangle: Rectangle) -> torch.Tensor:
        sizes.append(prod(rectangle.sizes))
        return plain(self, rectangle)

    def of_ours(self: Checkpoint, name: str, offset: Any = None, wanted: Any = None) -> torch.Tensor:
        sizes.append(prod(wanted))
        return of_checkpoint(self, name, offset, wanted)

    monkeypatch.setattr(HuggingFaceModel, "read", noted)
    monkeypatch.setattr(Checkpoint, "read", of_ours)
    monkeypatch.setattr(reading, "SLICE_BYTES", most)
    convert("import", source, tmp_path / "ours")
    convert("export", tmp_path / "ours", tmp_path / "out")
    assert max(sizes) * 4 <= most
    theirs.assert_same_tensors(source, tmp_path / "out")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    directory = theirs.save("deepseek_v3", tmp_path / "hf")
    tensors = theirs.tensors(directory)
    last = {name: values for name, values in tensors.items() if name.startswith("model.layers.2.")}
    further = {name.replace("layers.2.", "layers.3."): values.clone() for name, values in last.items()}
    further["model.layers.3.eh_proj.weight"] = torch.ones(36, 72)
    rewritten(directory, {**tensors, **further})
    assert "found tensor model.layers.3." in refused("import", directory, tmp_path / "ours")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 1}))
    document = convert("import", directory, tmp_path / "ours")
    assert document["left_out"] == len(further)
    convert("export", tmp_path / "ours", tmp_path / "out")
    assert theirs.tensors(tmp_path / "out").keys() == tensors.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    """Under its own ``model_type``, with one frequency between its betas."""
    yarn = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 10, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    _, settings = theirs.MODELS["deepseek_v3, no groups, not normalised"]
    settings = {**settings, "norm_topk_prob": True, "rope_parameters": yarn}
    with mock.patch.dict(theirs.MODELS, {"kimi": ("deepseek_v3", settings)}):
        directory = theirs.save("kimi", tmp_path / "hf", torch.float64)
    with theirs.exact_functions(), torch.no_grad():
        wanted = theirs.load(directory)(sequences()).logits
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "kimi_k2"}))
    assert convert("import", directory, tmp_path / "ours")["family"] == "deepseek_v3"
    ours = logits(tmp_path / "ours", sequences())
    assert float((ours - wanted).abs().max() / wanted.abs().max()) < 1e-10


def test_biases_of_routers_are_not_rounded_to_16_bits(tmp_path: Path) -> None:
    """They change in steps that bf16 would lose."""
    source = theirs.save("deepseek_v3", tmp_path / "hf")
    convert("import", source, tmp_path / "ours")
    convert("export", tmp_path / "ours", tmp_path / "out", "--dtype", "bf16")
    tensors, before = theirs.tensors(tmp_path / "out"), theirs.tensors(source)
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert biases and all(theirs.same(tensors[name], before[name]) for name in biases)
    assert {values.dtype for name, values in tensors.items() if name not in biases} == {torch.bfloat16}
