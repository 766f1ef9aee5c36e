"""Checks of the settings that a mixture of experts needs. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hexad.config import Config, ConfigError, alternatives, divisors
from hexad.config.model import MoeSettings
from hexad.parallel.expert.kinds import KINDS, unsupported


def expert_problems(config: Config) -> Iterator[ConfigError]:
    """Problems of experts and their degrees, each as an error that names field, value and fix."""
    moe, parallel = config.model.moe, config.parallel
    if moe is None:
        for name in ("expert", "expert_tensor"):
            if getattr(parallel, name) > 1:
                problem = (
                    f"found {getattr(parallel, name)}, but the model has no experts; set model.moe, or 1"
                )
                yield ConfigError(f"parallel.{name}", problem)
        return
    yield from _choice(moe)
    yield from _layers(moe, config.model.layers)
    yield from _unused(moe)
    width = int(moe.ffn_hidden)
    for name, size, what in (("expert", moe.experts, "experts"), ("expert_tensor", width, "ffn_hidden")):
        degree = getattr(parallel, name)
        if size % degree:
            yield ConfigError(
                f"parallel.{name}",
                f"found {degree}, which does not divide model.moe.{what} {size}; use {divisors(size)}",
            )
    shared = moe.shared_experts * width
    if shared % parallel.tensor:
        yield ConfigError(
            "parallel.tensor",
            f"found {parallel.tensor}, which does not divide the shared experts' width {shared} "
            f"(model.moe.shared_experts x ffn_hidden); use {divisors(shared)}",
        )
    yield from _dispatcher(config, moe)
    yield from _arithmetic(config, moe)


def _dispatcher(config: Config, moe: MoeSettings) -> Iterator[ConfigError]:
    """Requirements of the dispatcher on other settings, where there are other ranks."""
    if moe.dispatcher == "auto" or config.parallel.expert * config.parallel.expert_tensor == 1:
        return
    for need in KINDS[moe.dispatcher].needs(config):
        yield unsupported(moe.dispatcher, need)


def _choice(moe: MoeSettings) -> Iterator[ConfigError]:
    """How experts are chosen."""
    if moe.experts % moe.groups:
        yield ConfigError(
            "model.moe.groups",
            f"found {moe.groups}, which does not divide model.moe.experts {moe.experts}; "
            f"use {divisors(moe.experts)}",
        )
    if moe.top_groups > moe.groups:
        yield ConfigError(
            "model.moe.top_groups", f"found {moe.top_groups}, more than the {moe.groups} groups; use fewer"
        )
    choice = moe.experts // moe.groups * min(moe.top_groups, moe.groups)
    if moe.top_k > choice:
        of = f"the {moe.experts} experts"
        if choice < moe.experts:
            of = f"the {choice} experts of {moe.top_groups} of {moe.groups} groups"
        yield ConfigError("model.moe.top_k", f"found {moe.top_k}, more than {of}; use at most {choice}")


def _layers(moe: MoeSettings, layers: int) -> Iterator[ConfigError]:
    """Problems of the numbers of layers that have experts."""
    if moe.layers != "auto":
        wrong = [number for number in moe.layers if number >= layers]
        if wrong:
            yield ConfigError(
                "model.moe.layers", f"found {wrong[0]}; expected numbers from 0 to {layers - 1}"
            )
        if moe.every != 1 or moe.first_dense:
            yield ConfigError(
                "model.moe.layers", "found beside model.moe.every or first_dense; remove one of them"
            )
    if moe.layers == ():
        yield ConfigError("model.moe.layers", "found [], no layer; use numbers of layers, or model.moe: null")
    elif not any(moe.in_layer(number) for number in range(layers)):
        yield ConfigError(
            "model.moe.first_dense",
            f"found {moe.first_dense} with every {moe.every}: none of the {layers} layers has experts; "
            "use less, or model.moe: null",
        )


def _unused(moe: MoeSettings) -> Iterator[ConfigError]:
    """Settings that nothing would use."""
    if moe.bias_rate and not moe.biased:
        yield ConfigError(
            "model.moe.bias_rate",
            f"found {moe.bias_rate} with score {moe.score}; it needs score: sigmoid, or 0",
        )
    if moe.shared_gate and not moe.shared_experts:
        yield ConfigError("model.moe.shared_gate", "found true without shared_experts; set these, or false")
    if moe.forced and moe.bias_rate:
        yield ConfigError("model.moe.forced", "found true with bias_rate, which would follow no load; use 0")


def _arithmetic(config: Config, moe: MoeSettings) -> Iterator[ConfigError]:
    """Problems of arithmetic that cannot be computed with experts."""
    parallel = config.parallel
    if config.run.compile == "full":
        yield ConfigError(
            "run.compile",
            "found full with model.moe, whose products have other sizes in each step; use pointwise",
        )
    if config.model.mlp_bias is True:
        yield ConfigError("model.mlp_bias", "found true with model.moe, whose experts have none; use false")
    if not config.precision.exact:
        return
    if moe.capacity_factor is not None:
        yield ConfigError(
            "model.moe.capacity_factor",
            f"found {moe.capacity_factor} with precision.exact: which tokens are dropped depends on the "
            "others of the microbatch; use null",
        )
    if moe.dispatcher != "auto" and (reason := KINDS[moe.dispatcher].inexact):
        kinds = alternatives(["auto", *(name for name, kind in KINDS.items() if not kind.inexact)])
        yield ConfigError(
            "model.moe.dispatcher", f"found {moe.dispatcher} with precision.exact: {reason}; use {kinds}"
        )
    if parallel.expert_tensor > 1:
        yield ConfigError(
            "parallel.expert_tensor",
            f"found {parallel.expert_tensor} with precision.exact: results of parts of an expert are rounded "
            "before they are added; use 1",
        )
