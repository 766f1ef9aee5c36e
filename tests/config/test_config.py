"""The tree of settings: strict, readable errors, and a dump that loads as the same."""

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from hexad.config import Config, ConfigError, HexadError, dump_config, shown
from hexad.model.configuration import build_config, load_config
from hexad.model.families import presets

ERRORS = [
    ("model.layer=2", "model.layer: unknown key (did you mean 'model.layers'?)"),
    ("modle.layers=2", "modle: unknown key (did you mean 'model'?)"),
    ("parallel.lr=2", "parallel.lr: unknown key (did you mean 'optimizer.lr'?)"),
    ("log.zzz=2", "log.zzz: unknown key; known here: every, tensorboard, wandb"),
    ("model.layers=two", "model.layers: found 'two', expected an integer"),
    ("model.layers=0", "model.layers: found 0, expected greater than or equal to 1"),
    ("model.layers=1000000000000", "model.layers: found 1000000000000, expected less than"),
    ("run.steps=1.0e+23", "run.steps: found 1e+23, expected a smaller number"),
    ("run.seed=9223372036854775808", "run.seed: found 9223372036854775808, expected less than 92233720"),
    ("batch.global=100000000000", "batch.global: found 100000000000, expected less than or equal"),
    ("parallel.tensor=100000", "parallel.tensor: found 100000, expected less than or equal to 65536"),
    ("model.layers=1.5", "model.layers: found 1.5, expected an integer"),
    ("model.layers=null", "model.layers: found None, expected an integer"),
    ("run.compile=maybe", "run.compile: found 'maybe', expected 'auto', 'none', 'pointwise' or 'full'"),
    ("precision.dtype=bf61", "found 'bf61', expected 'auto', 'fp64', 'fp32', 'bf16', 'fp16' or 'fp8'"),
    ("precision.dtype=bf61", "(did you mean 'bf16'?)"),
    ("parallel.zero=4", "parallel.zero: found 4, expected less than or equal to 3"),
    ("parallel.data=some", "parallel.data: found 'some', expected "),
    ("parallel.data=some", "'auto'"),
    ("optimizer.lr=-1", "optimizer.lr: found -1, expected greater than 0"),
    ("optimizer.lr=.nan", "optimizer.lr: found nan"),
    ("parallel.bucket_mb=.inf", "parallel.bucket_mb: found inf, expected a finite number"),
    ("lr_schedule.min_lr=.nan", "lr_schedule.min_lr: found nan"),
    ("data.train=[[.inf, p]]", "data.train[0][0]: found inf, expected a finite number"),
    ("model.layers=true", "model.layers: found True, expected a number, not true or false"),
    ("model.rope_theta=true", "model.rope_theta: found True, expected a number, not true or false"),
    ("parallel.zero=true", "parallel.zero: found True, expected a number, not true or false"),
    ("batch.global=yes", "batch.global: found True, expected a number, not true or false"),
    ("parallel.data=true", "found True, expected a number, not true or false; or expected 'auto'"),
    ("data.train=3", "data.train: found 3, expected a prefix or [[weight, prefix], ...]"),
    ("data.train=[p]", "data.train[0]: found 'p', expected [weight, prefix] "
                       "(data.train is a prefix or [[weight, prefix], ...])"),
    ("data.train=[[1, a], [0, b]]", "data.train[1][0]: found 0, expected greater than 0"),
    ("data.validation=[[1]]", "data.validation[0]: found [1], expected [weight, prefix]"),
    ("data.validation=[[1, 2]]", "data.validation[0][1]: found 2, expected a string"),
    ("parallel.split=3", "parallel.split: found 3, expected 'cost', 'even' or [layers, ...]"),
    ("parallel.split=evn", "expected 'cost', 'even' or [layers, ...] (did you mean 'even'?)"),
    ("parallel.split=[2, -1]", "parallel.split[1]: found -1, expected greater than or equal to 0"),
    ("optimizer.betas=[0.9]", "optimizer.betas: found [0.9], expected [beta1, beta2]"),
    ("optimizer.betas=[0.9, 2]", "optimizer.betas[1]: found 2, expected less than 1"),
    ("model.rope_scaling.factr=2", "unknown key (did you mean 'model.rope_scaling.factor'?)"),
    ("model.preset=llama", "model.preset: unknown preset 'llama' (did you mean 'llama3-8b'?)"),
    ("model.heads=7", "model.hidden: 256 is not divisible by model.heads 7"),
    ("model=3", "model: found 3, expected "),
    ("run.seed.x=3", "run.seed"),
    ("run.seed", "found 'run.seed', expected a setting name=value"),
    ("=3", "found '=3', expected a setting name=value"),
    ("run.seed=[", "override run.seed, line 1"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "says"), ERRORS)
def test_errors_name_field_found_and_fix(override: str, says: str) -> None:
    with pytest.raises(HexadError) as caught:
        load_config({"run": {"seed": 1}}, [override])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_errors(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text, says in (
        ("run: {seed: 1, seed: 2}", "line 1, column 16: not valid YAML: key 'seed' is given twice"),
        ("run: {seed: 1}\nmodel: {}\nrun: {}", "line 3, column 1: not valid YAML: key 'run' is given twice"),
        ("run: {seed: 1", "not valid YAML"),
        ("- 1", "found a list, expected a mapping of settings"),
        ("run: 1", "run: found 1, expected "),
        ("1: 2", "1: unknown key"),
    ):
        path.write_text(text)
        with pytest.raises(HexadError) as caught:
            load_config(path)
        assert says in str(caught.value), text
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HexadError, match="cannot be read"):
        load_config(path)
    path.write_text("")
    assert load_config(path) == build_config({})


def test_overrides() -> None:
    tree: dict[str, Any] = {"optimizer": {"lr": 0.1}, "model": {"rope_scaling": {"factor": 4}}}
    kept = deepcopy(tree)
    config = load_config(
        tree,
        [
            "model.rope_scaling.factor=2",
            "optimizer.lr=1e-3",
            "data.train=[[1, a], [2.5, b]]",
            "batch.global=8",
            "run.seed=3",
            "run.seed=4",
        ],
    )
    assert config.optimizer.lr == 1e-3 and config.batch.global_ == 8
    assert config.data.train == [(1.0, "a"), (2.5, "b")]
    assert config.run.seed == 4  # the last counts
    assert config.model.rope_scaling is not None and config.model.rope_scaling.factor == 2
    assert tree == kept  # the caller's own stays
    assert load_config(None, ["model.rope_scaling.factor=2"]).model.rope_scaling is not None


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_fill_in_and_the_users_keys_win(name: str) -> None:
    model = build_config({"model": {"preset": name}}).model
    for key, value in presets()[name].items():
        setting = getattr(model, key)
        assert setting == value or (isinstance(value, dict) and setting is not None), key
    # Even where the user's value is the schema's default.
    assert build_config({"model": {"preset": name, "layers": 4}}).model.layers == 4
    assert model.layers != 4


def test_family_defaults() -> None:
    def model(**settings: object) -> Config:
        return build_config({"model": {"hidden": 96, "heads": 12, **settings}})

    gpt2, qwen2, qwen3 = (model(family=name).model for name in ("gpt2", "qwen2", "qwen3"))
    llama = model().model
    assert (gpt2.kv_heads, gpt2.ffn_hidden, gpt2.tied_embeddings, gpt2.qkv_bias) == (12, 384, True, True)
    assert (llama.kv_heads, llama.ffn_hidden, llama.tied_embeddings, llama.qkv_bias) == (4, 256, False, False)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen3.qkv_bias, qwen3.qk_norm) == (True, False, False, True)
    assert llama.head_dim == 8 and model(head_dim=10).model.head_dim == 10
    assert model(heads=6).model.kv_heads == 6
    assert model(family="gpt2", tied_embeddings=False).model.tied_embeddings is False


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.preset=llama3-8b", "parallel.tensor=8", "data.train=[[1, a], [2, b]]"],
        ["model.family=gpt2", "parallel.split=[1, 3]", "memory.recompute_layers=2", "log.wandb=x"],
        ["model.rope_scaling.factor=2", "lr_schedule.decay_steps=9", "validate.every=2"],
    ],
)
def test_what_is_dumped_loads_as_the_same(overrides: list[str], tmp_path: Path) -> None:
    config = load_config(None, overrides)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert dump_config(load_config(path)) == dump_config(config)
    assert (
        "validate" in yaml.safe_load(path.read_text())
        and "global" in yaml.safe_load(path.read_text())["batch"]
    )


def test_a_config_cannot_be_changed_in_place() -> None:
    config = build_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 2  # type: ignore[misc]


def test_config_error_knows_its_field() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["optimizer.lr=x"])
    assert caught.value.field == "optimizer.lr"
    copy = pickle.loads(pickle.dumps(caught.value))  # as a worker process sends it
    assert type(copy) is ConfigError
    assert (str(copy), copy.field) == (str(caught.value), "optimizer.lr")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["model.family=gpt2", "model.rope_theta=5e5"],
            "model.rope_theta: found 500000.0, but gpt2 has learned",
        ),
        (
            ["model.preset=gpt2", "model.rope_theta=5e5"],
            "model.rope_theta: found 500000.0, but gpt2 has learned",
        ),
    ],
)
def test_settings_that_the_family_ignores(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert str(caught.value).startswith(says)
    assert str(caught.value).endswith("; remove it")


@pytest.mark.parametrize("preset", [None, *sorted(presets())])
@pytest.mark.parametrize("family", [None, "gpt2", "llama"])
def test_a_resolved_configuration_is_never_refused(preset: str | None, family: str | None) -> None:
    given = {"preset": preset, "family": family}
    if preset and family not in (None, presets()[preset]["family"]):
        with pytest.raises(
            ConfigError, match=rf"^model.family: found '{family}', but model.preset {preset} is"
        ):
            build_config({"model": given})
        return
    config = build_config({"model": {key: value for key, value in given.items() if value}})
    # As a run does before it writes the configuration.
    positions = config.model.max_positions if config.model.max_positions != "auto" else config.data.sequence
    model = config.model.model_copy(update={"vocab": config.model.vocab, "max_positions": positions})
    config = config.model_copy(update={"model": model})
    assert build_config(config.model_dump(mode="json", by_alias=True)).model == config.model
    again = yaml.safe_load(dump_config(config))
    assert build_config(again).model.model_copy(update={"max_positions": positions}) == config.model
    if config.model.family != "gpt2":  # and a longer sequence may be tried with it
        again["data"]["sequence"] *= 2
        build_config(again)


@pytest.mark.parametrize(("text", "value"), [("010", 10), ("0x10", 16), ("1_000", 1000), ("+7", 7)])
def test_numbers_are_those_of_yaml_1_2(text: str, value: int) -> None:
    assert load_config(None, [f"run.steps={text}"]).run.steps == value


@pytest.mark.parametrize("text", ["2024-01-31", "2024-13-45", "12:30", "010"])
def test_names_that_look_like_dates_and_octals_stay_names(text: str) -> None:
    assert load_config(None, [f"run.dir={text}"]).run.dir == text


def test_values_are_shown_by_their_beginning() -> None:
    """As Python writes them, in time that does not grow with them."""
    for value in (3, "a", b"a", None, [1, "b"], {"a": [1, {}]}, (), [], {}, 1.5):
        assert shown(value) == repr(value)
    assert shown(["a" * 10**6] * 10**6) == repr(["a" * 70])[:60]
    assert shown([0] * 10**7, 1000) == f"[{'0, ' * 20}...]"
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    assert shown(nested) == "[[[...]]]"
