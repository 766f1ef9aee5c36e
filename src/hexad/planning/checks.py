"""Everything that must fit together before a run may start. No torch: runs before any process is launched."""

from collections.abc import Iterator
from itertools import chain

from hexad.config import Config, ConfigError, counted, divisors
from hexad.config.model import ModelSettings, RopeScaling
from hexad.config.schema import FaultSettings
from hexad.model.families import family
from hexad.model.inventory import ModelInventory
from hexad.model.trained import Trained, check_trained
from hexad.topology.layout import Layout, nearest_multiples

from .degree_checks import context_problems, sharding_problems, tensor_problems
from .expert_checks import expert_problems


def check_config(config: Config, layout: Layout) -> None:
    """Refuse what is unsupported or does not fit the layout.

    Raises:
        ConfigError: the first problem, naming the field, the value found and the fix.
    """
    for problem in chain(_settings(config, layout), _language_model(config, layout)):
        raise problem


def check_settings(config: Config, layout: Layout) -> None:
    """Check the settings that the caller's own modules use too (:func:`check_config` checks all).

    Raises:
        ConfigError: the first problem, naming the field, the value found and the fix.
    """
    for problem in _settings(config, layout):
        raise problem
    divided = {"context": "tokens", "expert": "experts", "expert_tensor": "experts"}
    for name, what in divided.items():
        degree = getattr(config.parallel, name)
        if degree > 1:
            raise ConfigError(
                f"parallel.{name}",
                f"found {degree} with modules of your own, whose {what} Hexad does not divide; use 1",
            )


def _settings(config: Config, layout: Layout) -> Iterator[ConfigError]:
    yield from _schedule(config)
    yield from sharding_problems(config, layout)
    yield from _precision(config)
    yield from _faults(config)


def _language_model(config: Config, layout: Layout) -> Iterator[ConfigError]:
    yield from _model(config)
    yield from expert_problems(config)
    yield from tensor_problems(config, layout.tensor)
    yield from _compiled(config)
    yield from context_problems(config)
    yield from _batch(config, layout)
    yield from _recompute(config)
    for field, value in (
        ("checkpoint.keep_best", config.checkpoint.keep_best),
        ("validate.patience", config.validate_.patience),
    ):
        if value and not config.validate_.every:
            yield ConfigError(field, f"found {value}, but nothing is evaluated; set validate.every")
    if config.validate_.every and not config.data.validation_sets:
        yield ConfigError(
            "data.validation",
            f"found no data, but validate.every {config.validate_.every} turns evaluation on; name its data, "
            "or use validate.every: 0",
        )
    if config.precision.dtype == "fp8":
        yield from _fp8(config, layout.tensor)


def _model(config: Config) -> Iterator[ConfigError]:
    model, sequence = config.model, config.data.sequence
    kv_heads, width = int(model.kv_heads), int(model.head_dim)
    if model.heads % kv_heads:
        yield ConfigError(
            "model.kv_heads",
            f"found {kv_heads}, which does not divide model.heads {model.heads}; use {divisors(model.heads)}",
        )
    rotary = family(model.family).rotary
    if rotary and width % 2:
        yield ConfigError("model.head_dim", f"found {width}, expected an even number (rotary pairs)")
    turned = model.rotary_width
    if rotary and (turned % 2 or not turned):
        yield ConfigError(
            "model.rotary_fraction",
            f"found {model.rotary_fraction}, which makes {turned} of a head's {width} elements; expected an "
            "even number of them (rotary pairs)",
        )
    if model.max_positions != "auto" and sequence > model.max_positions:
        larger = "; raise both to train beyond them" if rotary else ""
        yield ConfigError(
            "data.sequence",
            f"found {sequence}, more than the model's {model.max_positions} positions "
            f"(model.max_positions){larger}",
        )
    yield from _rope_scaling(model)
    yield from _trained(model)
    if not rotary and (model.rope_scaling is not None or model.qk_norm):
        field = "model.rope_scaling" if model.rope_scaling is not None else "model.qk_norm"
        yield ConfigError(field, f"{model.family} has no rotary positions and no query/key norm; remove it")
    if not rotary and model.rotary_fraction != 1.0:
        yield ConfigError(
            "model.rotary_fraction",
            f"found {model.rotary_fraction}, but {model.family} has learned positions, not rotary ones; "
            "remove it",
        )


def _rope_scaling(model: ModelSettings) -> Iterator[ConfigError]:
    scaling, field = model.rope_scaling, "model.rope_scaling."
    if scaling is None:
        return
    defaults, used = RopeScaling(), RopeScaling.USED[scaling.type]
    for name in RopeScaling.model_fields:
        value = getattr(scaling, name)
        if name not in used and value != getattr(defaults, name):
            problem = f"found {value}, which type {scaling.type} does not use; remove it"
            yield ConfigError(field + name, problem)
        if name in used and name.endswith("_factors") and len(value) != model.rotary_width // 2:
            problem = f"found {counted(len(value), 'number')}, expected {model.rotary_width // 2}"
            yield ConfigError(field + name, f"{problem}: half of the elements of a head that are rotated")
    if scaling.type == "longrope" and scaling.original_positions == 1:
        yield ConfigError(f"{field}original_positions", "found 1, expected at least 2")
    pair = {"llama3": ("high_freq_factor", "low_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
    if scaling.type in pair:
        large, small = (getattr(scaling, name) for name in pair[scaling.type])
        equal = scaling.type == "yarn"  # one frequency, or one and the next: as Kimi K2 has it
        if large < small or (large == small and not equal):
            (name, other), least = pair[scaling.type], "at least" if equal else "more than"
            yield ConfigError(field + name, f"found {large}, expected {least} {other} {small}")


def _trained(model: ModelSettings) -> Iterator[ConfigError]:
    if model.train == "all" and model.lora is None:
        return
    # Names do not depend on the vocabulary, which may not be known yet.
    plain = model.model_copy(update={"vocab": 1, "train": "all", "lora": None, "max_positions": 1})
    whole = ModelInventory(plain)
    outputs = [names for number in range(model.layers) for names in whole.block(number).outputs]
    try:
        weights = whole.weights()
        by_rule = [name for name, weight in weights.items() if weight.wide]
        check_trained(model, list(weights), outputs, by_rule)
    except ConfigError as error:
        yield error


def _compiled(config: Config) -> Iterator[ConfigError]:
    """Refuse what ``run.compile: full`` cannot compile into one graph with a block."""
    parallel, memory, dropout = config.parallel, config.memory, config.model.attention_dropout
    recompute, parts = memory.recompute, " ".join(memory.recompute_parts)
    isolated = "isolated documents (data.documents isolate, or data.packing of whole ones)"
    refused = (
        (parallel.tensor > 1, f"parallel.tensor {parallel.tensor}; it needs parallel.tensor 1"),
        # Hooks on saved tensors, and a pass that is cut short.
        (recompute != "none", f"memory.recompute {recompute}; it needs none"),
        (bool(parts), f"memory.recompute_parts {parts}; it needs an empty list"),
        (dropout > 0, f"model.attention_dropout {dropout}; it needs 0"),
        # Every number of documents would be a graph of its own.
        (config.data.documents == "isolate", f"{isolated}; it needs documents: join and packing: cut"),
        (parallel.context > 1, f"parallel.context {parallel.context}; it needs parallel.context 1"),
    )
    for present, what in refused:
        if present and config.run.compile == "full":
            yield ConfigError("run.compile", f"found full with {what}, or use pointwise")


def _batch(config: Config, layout: Layout) -> Iterator[ConfigError]:
    size, per_pass = config.batch.global_, config.batch.micro * int(layout.data)
    if size % per_pass:
        near = nearest_multiples(per_pass, size)
        yield ConfigError(
            "batch.global",
            f"found {size}, expected a multiple of batch.micro {config.batch.micro} x data degree "
            f"{layout.data} = {per_pass}; the nearest are {near}",
        )
    yield from _ramp(config, per_pass)
    schedule = config.lr_schedule
    decays = schedule.kind in ("linear", "cosine") and schedule.decay_steps not in ("auto", config.run.steps)
    if decays and int(schedule.decay_steps) <= schedule.warmup:
        yield ConfigError(
            "lr_schedule.decay_steps",
            f"found {schedule.decay_steps}, expected more than lr_schedule.warmup {schedule.warmup}",
        )
    yield from _rates(config)


def _ramp(config: Config, per_pass: int) -> Iterator[ConfigError]:
    batch = config.batch
    if batch.ramp is None:
        return
    start, increment, _ = batch.ramp
    actual = f"found {list(batch.ramp)}"
    if start >= batch.global_:
        yield ConfigError("batch.ramp", f"{actual}, whose start is not below batch.global {batch.global_}")
    elif (batch.global_ - start) % increment:
        problem = f"whose increment {increment} does not divide {batch.global_ - start}, from its start to"
        yield ConfigError("batch.ramp", f"{actual}, {problem} batch.global {batch.global_}")
    if any(size % per_pass for size in (start, increment)):
        problem = "expected a start and an increment that are multiples of batch.micro"
        data = per_pass // batch.micro
        yield ConfigError(
            "batch.ramp", f"{actual}, {problem} {batch.micro} x data degree {data} = {per_pass}"
        )


def _rates(config: Config) -> Iterator[ConfigError]:
    rule, schedule = config.optimizer, config.lr_schedule
    default = type(schedule).model_fields["min_lr"].default  # it gives way to a small peak
    for peak_name, low_name in (("lr", "min_lr"), ("decoupled_lr", "decoupled_min_lr")):
        peak, low = getattr(rule, peak_name), getattr(schedule, low_name)
        name = low_name
        if low is None:
            name, low = "min_lr", schedule.min_lr
        if peak is not None and peak < low != default:
            yield ConfigError(f"lr_schedule.{name}", f"found {low}, more than optimizer.{peak_name} {peak}")
    if rule.decoupled_lr is None and schedule.decoupled_min_lr is not None:
        actual = f"found {schedule.decoupled_min_lr} without optimizer.decoupled_lr"
        yield ConfigError("lr_schedule.decoupled_min_lr", f"{actual}; set that, or remove it")
    trained = Trained.of(config.model)
    if rule.decoupled_lr is not None and trained.frozen("embedding.weight") and trained.frozen("head.weight"):
        problem = f"found {rule.decoupled_lr}, but neither embedding nor output head is trained; remove it"
        yield ConfigError("optimizer.decoupled_lr", problem)


def _recompute(config: Config) -> Iterator[ConfigError]:
    layers = config.memory.recompute_layers
    if layers != "all" and config.memory.recompute == "none":
        yield ConfigError(
            "memory.recompute_layers",
            f"found {layers} with memory.recompute none; remove it, or set recompute: selective or full",
        )


def _schedule(config: Config) -> Iterator[ConfigError]:
    settings = config.parallel
    for field, owner in (("schedule_group", "interleaved"), ("schedule_memory", "auto")):
        value = getattr(settings, field)
        if value != "auto" and settings.schedule != owner:
            yield ConfigError(
                f"parallel.{field}",
                f"found {value} with parallel.schedule {settings.schedule}; only {owner} uses it: remove it",
            )


def _precision(config: Config) -> Iterator[ConfigError]:
    settings = config.precision
    if settings.reduce == "bf16" and settings.dtype not in ("bf16", "fp8"):
        either = ", which is fp32 on some devices" if settings.dtype == "auto" else ""
        yield ConfigError(
            "precision.reduce",
            f"found bf16 with precision.dtype {settings.dtype}{either}; it needs dtype bf16 or fp8, or use "
            "fp32",
        )
    if settings.accumulate == "bf16" and settings.reduce != "bf16":
        yield ConfigError(
            "precision.accumulate",
            f"found bf16 with precision.reduce {settings.reduce}; it needs reduce: bf16, or use fp32",
        )
    if settings.fp8_weight_gradients and settings.dtype != "fp8":
        yield ConfigError(
            "precision.fp8_weight_gradients",
            f"found true with precision.dtype {settings.dtype}; it needs dtype fp8: remove it",
        )
    if settings.exact and settings.dtype in ("fp64", "fp8"):
        yield ConfigError(
            "precision.exact",
            f"found true with precision.dtype {settings.dtype}; it computes fp32, bf16 and fp16: use one of "
            "these",
        )
    if settings.exact and config.run.compile == "full":
        yield ConfigError(
            "precision.exact",
            "found true with run.compile full, which would join operations; use pointwise or none",
        )
    scaled, dynamic = settings.dtype == "fp16", settings.loss_scale == "dynamic"
    fields = type(settings).model_fields
    for name in (name for name in fields if name.startswith("loss_scale")):
        value = getattr(settings, name)
        if value != fields[name].default and not scaled:
            yield ConfigError(
                f"precision.{name}",
                f"found {value} with precision.dtype {settings.dtype}; only fp16 scales its loss: remove it",
            )
        if value != fields[name].default and name != "loss_scale" and not dynamic:
            yield ConfigError(
                f"precision.{name}",
                f"found {value} with a fixed precision.loss_scale of {settings.loss_scale}; remove one",
            )
    if settings.loss_scale_initial < settings.loss_scale_min:
        yield ConfigError(
            "precision.loss_scale_initial",
            f"found {settings.loss_scale_initial}, less than precision.loss_scale_min "
            f"{settings.loss_scale_min}",
        )


def _faults(config: Config) -> Iterator[ConfigError]:
    for name in ("spike_window", "on_spike"):
        value, default = getattr(config.faults, name), FaultSettings.model_fields[name].default
        if config.faults.spike is None and value != default:
            yield ConfigError(
                f"faults.{name}", f"found {value} with faults.spike null; set faults.spike, or remove it"
            )


def _fp8(config: Config, tensor: int) -> Iterator[ConfigError]:
    """Problems of products in 8 bits, all of whose sizes must be multiples of 16 (cuBLASLt's condition)."""
    model, ffn = config.model, int(config.model.ffn_hidden)
    share = f" / parallel.tensor {tensor}" if tensor > 1 else ""
    context = config.parallel.context
    tokens, length = config.batch.micro * config.data.sequence // context, config.data.sequence
    local = f"it x data.sequence {length}" + (f" / parallel.context {context}" if context > 1 else "")
    sizes = (
        ("model.hidden", model.hidden, "", model.hidden),
        *_attention_sizes(model, tensor, share),
        ("model.ffn_hidden", ffn, f"it{share}", ffn // tensor),
        ("batch.micro", config.batch.micro, local, tokens),
    )
    if model.mla is not None and config.parallel.sequence:  # whose first product is of a rank's own tokens
        sizes = (*sizes, ("batch.micro", config.batch.micro, local + share, tokens // tensor))
    for field, value, formula, size in sizes:
        if size % 16:
            product = f" ({formula} = {size})" if formula and size != value else ""
            yield ConfigError(
                field,
                f"found {value}{product}, but precision.dtype fp8 multiplies multiples of 16; "
                f"change it{', or parallel.tensor' if 'tensor' in product else ''}, or use bf16",
            )


_Size = tuple[str, int, str, int]
"""A setting, its value, the formula with it, and the result."""


def _attention_sizes(model: ModelSettings, tensor: int, share: str) -> tuple[_Size, ...]:
    """Sizes of the products of attention's projections on one of so many tensor ranks; ``share`` says so."""
    heads, width, kv_heads, mla = model.heads, int(model.head_dim), int(model.kv_heads), model.mla
    if mla is None:
        return (
            ("model.head_dim", width, f"model.heads {heads} x it{share}", heads * width // tensor),
            (
                "model.kv_heads",
                kv_heads,
                f"2 x it x model.head_dim {width}{share}",
                2 * kv_heads * width // tensor,
            )
            if kv_heads >= tensor
            else ("model.head_dim", width, "2 x it", 2 * width),  # of one key and one value head
        )
    ranks = (mla.q_rank or 0) + mla.kv_rank
    nope, value = mla.nope_dim, mla.value_dim
    keys_and_values = heads * (nope + value) // tensor
    return (
        ("model.mla.q_rank", mla.q_rank or 0, "", mla.q_rank or 0),
        ("model.mla.kv_rank", mla.kv_rank, "", mla.kv_rank),
        ("model.mla.rope_dim", mla.rope_dim, f"q_rank + kv_rank {ranks} + it", ranks + mla.rope_dim),
        ("model.head_dim", width, f"model.heads {heads} x it{share}", heads * width // tensor),
        ("model.mla.nope_dim", nope, f"model.heads {heads} x (it + value_dim){share}", keys_and_values),
        ("model.mla.value_dim", value, f"model.heads {heads} x it{share}", heads * value // tensor),
    )
