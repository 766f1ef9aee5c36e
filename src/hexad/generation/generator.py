"""Generation from a run, a checkpoint or a published model over any number of tensor, context, pipeline and
data ranks: the one generator behind the commands, the server, evaluation and the functions in Python."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar, Unpack
from weakref import WeakKeyDictionary

from hexad.checkpoint.directory import different_setting
from hexad.comm import agreed, from_first
from hexad.config import ConfigError, HexadError, listed_overrides
from hexad.dataset.text.token_text import TokenText
from hexad.engine.engine import Engine
from hexad.launching.environment import environment
from hexad.launching.launch import launch, resolved_alike
from hexad.model.transformer import DTYPES
from hexad.parallel.resharding import Resharding
from hexad.planning import Resolved
from hexad.planning.layouts import planned_layout
from hexad.planning.saved_model import SavedModel, find_model, generating_model, model_in_training
from hexad.topology.mesh import Mesh

from .constraints import Constraints
from .front import Front, connected, serve_link
from .loading import build_model, converted, load_model, make_replica
from .prompts import Prompt, PromptEncoder
from .requests import Request
from .sampling import Sampling
from .texts import (
    Continuation,
    Settings,
    continuation,
    prompt_list,
    requests_of,
    sampling_of,
    sampling_of_prompt,
)
from .weights import StageWeights

log = logging.getLogger("hexad")
T = TypeVar("T")


class Generator:
    """A model that generates. In a world of several ranks all of them construct it and call its methods
    together; the first rank's arguments count. Used as a context manager, or closed by :meth:`close`.

    Attributes:
        saved: the model.
        tokenizer: its tokenizer.
        text: what each of its tokens adds to a text.
        constraints: makes the constraints of texts that conform to a grammar.
        first: whether this is the first rank.
        warn: called with a message, once, where a request has more positions than the model was made for.

    Args:
        source: a run, a checkpoint, ``hf:DIR``, or what :func:`generating_model` returned; or an engine that
            trains a language model in this world, whose weights :meth:`update` takes again. Its process
            groups last as long as the world: make one generator for an engine, not one for each step.
        overrides: of its settings, as in ``precision.dtype=fp32``.
        degrees: of ``tensor``, ``context``, ``pipeline`` and ``data``: short for ``parallel.tensor=2``. Ranks
            that are left are tensor-parallel, or beside an engine have replicas.

    Raises:
        HexadError: the model cannot be used, the same on all ranks.
    """

    def __init__(
        self, source: str | Path | SavedModel | Engine, overrides: Iterable[str] = (), **degrees: int
    ) -> None:
        if unknown := sorted(degrees.keys() - {"tensor", "context", "pipeline", "data"}):
            raise HexadError(
                f"Generator: unknown argument {unknown[0]!r}; expected tensor, context, pipeline, data"
            )
        self.warn: Callable[[str], object] = log.warning
        self._warned = self._closed = False
        self._failure: str | None = None
        self._transfers: WeakKeyDictionary[Engine, Resharding] = WeakKeyDictionary()
        self._stack = ExitStack()
        try:
            if isinstance(source, Engine):
                self._beside(source, overrides, degrees)
            else:
                layout = (f"parallel.{name}={degree}" for name, degree in degrees.items())
                settings = (*listed_overrides(overrides), *layout)
                if not isinstance(source, SavedModel):
                    source = generating_model(find_model(str(source)), settings, environment().world)
                run = self._stack.enter_context(launch(source.config))
                self._build(source, run.mesh, run.resolved)
        except BaseException:
            self._stack.close()
            raise

    def _beside(self, engine: Engine, overrides: Iterable[str], degrees: Mapping[str, int]) -> None:
        """Begin with the weights of an engine, over the same ranks, with process groups of its own."""
        if not engine.workload.configured:
            raise HexadError("Generator: found an engine of modules; it takes that of a language model")
        world = engine.mesh.layout.world
        saved = model_in_training(engine.config, overrides, degrees, world)
        layout = planned_layout(saved.config, world)
        mesh = Mesh.create(layout, engine.mesh.device, saved.config.run.timeout, engine.mesh.trace)
        self._build(saved, mesh, resolved_alike(saved.config, mesh), engine)

    def _build(self, saved: SavedModel, mesh: Mesh, resolved: Resolved, engine: Engine | None = None) -> None:
        self.saved, self._mesh, config, layers = saved, mesh, resolved.config, resolved.plan.layers
        self.first = mesh.rank == 0
        _bound_kernels(config.inference.kernels)
        self.tokenizer = agreed(saved.tokenizer, mesh.world)
        if engine is None:
            self._model = load_model(config, saved.weights, mesh, layers)
            self._weights = StageWeights(self._model)
            self._weights.pack()
        else:
            dtype = DTYPES[config.precision.dtype]
            self._model = converted(build_model(config, mesh, layers, dtype), dtype)
            self._weights = StageWeights(self._model)
            self._take(engine)
        self.constraints = Constraints(self.tokenizer, self._model.vocab)
        # Its cache takes of the memory that is left.
        self.text = TokenText(self.tokenizer)
        self._replica = make_replica(self._model, config, mesh, saved.positions, self.text, self.constraints)
        self.scheduler = self._replica.scheduler
        self._links = connected(mesh)
        for link in self._links:
            self._stack.callback(link.close)
        if self.first:
            self.front = self._stack.enter_context(Front(self._replica, self._links))
        self.encoder = PromptEncoder(saved, self.tokenizer)

    def update(self, engine: Engine) -> None:
        """Take the weights of an engine that trains the same model in the same processes, in any layout: each
        rank receives from others what it does not have. All ranks call this together, between generations.

        Raises:
            HexadError: the engine is that of another model, or of other ranks.
        """
        if not isinstance(engine, Engine) or not engine.workload.configured:
            raise HexadError(f"update: found {engine!r:.60}, expected an engine of a language model")
        if engine.mesh.layout.world != self._mesh.layout.world:
            ranks = f"{engine.mesh.layout.world} ranks, and the generator {self._mesh.layout.world}"
            raise HexadError(f"update: the engine has {ranks}; both need the same")
        saved = engine.config.model.model_dump(mode="json", by_alias=True)
        if (difference := different_setting(saved, self.saved.config)) is not None:
            name, ours, theirs = difference
            raise HexadError(f"update: {name}: found {ours!r}, but the engine has {theirs!r}")
        self._take(engine)
        self.scheduler.pool.forget()  # keys of other weights

    def _take(self, engine: Engine) -> None:
        published = engine.published()
        needed = [(rectangle, values) for rectangle, values, _ in self._weights.pieces()]
        if engine not in self._transfers:
            have, need = ([rectangle for rectangle, _ in side] for side in (published, needed))
            self._transfers[engine] = Resharding(have, need, self._mesh.world)
        self._transfers[engine].run(published, needed, DTYPES[engine.config.precision.dtype])
        self._weights.pack()

    @property
    def sequences(self) -> int:
        """Sequences that run at once, on all replicas."""
        return self.scheduler.most * self._mesh.data.size

    @property
    def capacity(self) -> int:
        """Tokens of the cache of each replica."""
        return self.scheduler.pool.blocks * self.scheduler.pool.size

    def generate(
        self, prompts: str | Sequence[str | Prompt], **settings: Unpack[Settings]
    ) -> list[Continuation]:
        """Continue prompts.

        Args:
            prompts: a text; or several, each a text, ``{"prompt": text or ids}``, or ``{"messages": [...]}``
                for the tokenizer's chat template. Settings in such an object apply to its prompt.
            settings: fields of :class:`~hexad.generation.sampling.Sampling`, see
                :class:`~hexad.generation.texts.Settings`.

        Returns:
            One for each prompt and sample, in this order; the same on every rank.

        Raises:
            HexadError: a prompt or a setting cannot be used.
        """

        def texts() -> list[Continuation]:
            # All are checked before any is computed.
            requests = [*self.requests(prompt_list(prompts), sampling_of(settings))]
            texts = [text for _, text in self.written(requests)]
            return sorted(texts, key=lambda text: (text.number, text.sample))

        return self.shared(texts)

    def on_first(self, action: Callable[[], T]) -> T:
        """Do something on the first rank only, which computes nothing; returns what it returns, on every
        rank.

        Raises:
            HexadError: what the action raised, on every rank.
        """
        return from_first(action, self._mesh.world)

    def shared(self, action: Callable[[], T]) -> T:
        """Do something on the first rank that uses :meth:`written` or :meth:`front`, while all others compute
        for it; returns what it returns, on every rank.

        Raises:
            HexadError: what the action raised, on every rank.
        """
        result, error = self.lead(action)

        def outcome() -> T:
            if error is not None:
                raise error
            return result  # type: ignore[return-value]

        return from_first(outcome, self._mesh.world)

    def lead(self, action: Callable[[], T]) -> tuple[T | None, HexadError | None]:
        """Do the same as :meth:`shared`, but only the first rank has what the action returns or raises.

        Raises:
            HexadError: a step has failed before.
        """
        if self._closed:
            raise HexadError("Generator: it is closed; make another generator")
        if self._failure is not None:
            raise HexadError(f"Generator: a step has failed ({self._failure}); make another generator")
        try:
            return self._lead(action)
        except BaseException as error:  # steps may have been begun that nobody ends
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _lead(self, action: Callable[[], T]) -> tuple[T | None, HexadError | None]:
        if not self.first:
            if self._replica.leads:
                serve_link(self._replica, self._links[0])
            else:
                self._replica.follow()
            return None, None
        result, error = None, None
        try:
            result = action()
        except HexadError as raised:  # others end the process, and the launcher the other ranks
            error = raised
        self.front.stop()
        return result, error

    def requests(
        self, prompts: Iterable[Prompt], sampling: Sampling
    ) -> Iterator[tuple[int, Prompt, Request]]:
        """The requests of prompts, with each prompt's number, made as they are needed, on the first rank.

        Raises:
            HexadError: a prompt cannot be used.
        """
        checked = None
        for number, prompt in enumerate(prompts):
            name = f"prompt {number + 1}"
            settings = sampling_of_prompt(sampling, prompt, name)
            for request in requests_of(prompt, settings, self.encoder, name):
                grammar = request.sampling.grammar
                if grammar is not None and grammar != checked:
                    self.constraints.check(grammar)
                    checked = grammar
                self.check(request)
                yield number, prompt, request

    def check(self, request: Request) -> None:
        """Check that a request can be computed.

        Raises:
            ConfigError: it has more tokens than the model has positions, or the cache blocks; or in
                ``precision.exact`` other frequencies (LongRoPE) apply to its end than to its beginning; or
                experts are to be returned by a model without.
        """
        if request.sampling.routing and not self._model.model.expert_layers:
            raise ConfigError("routing", "found true, but the model has no experts (model.moe)")
        positions, longest = self.saved.positions, request.longest
        texts = f"{len(request.prompt)} prompt tokens and {request.sampling.tokens} new ones exceed"
        if longest > positions and not self._warned:
            self._warned = True
            limit = f"the model was made for {positions} (model.max_positions)"
            self.warn(f"prompt and new tokens reach {longest} positions, {limit}")
        if longest > (most := self.saved.most_positions or longest):
            raise ConfigError("tokens", f"{texts} the model's {most} positions")
        if longest > self.capacity:
            problem = f"{texts} the cache's {self.capacity} tokens (inference.cache_tokens)"
            raise ConfigError("tokens", problem)
        switch = self.scheduler.switch
        if self._model.shard.exact and len(request.prompt) <= switch < longest:
            other = f"other rotary frequencies apply to texts of more than {switch} tokens, all of whose"
            raise ConfigError("precision.exact", f"{texts} {switch}: {other} log-probabilities change")
        for token, _ in request.sampling.logit_bias:
            if token >= self._model.vocab:
                known = f"the model's vocabulary is {self._model.vocab}"
                raise ConfigError("logit_bias", f"found token {token}, but {known}")

    def written(
        self, requests: Iterable[tuple[int, Prompt, Request]]
    ) -> Iterator[tuple[Prompt, Continuation]]:
        """Prompts and texts of requests as these end, on the first rank inside :meth:`lead`; requests are
        taken as they are needed."""
        entries: dict[int, tuple[int, Prompt, Request]] = {}

        def submitted() -> Iterator[Request]:
            for place, entry in enumerate(requests):
                entries[place] = entry
                yield entry[2]

        for place, updates in self.front.completed(submitted()):
            number, prompt, request = entries.pop(place)
            content = prompt["prompt"] if "prompt" in prompt else prompt["messages"]
            yield prompt, continuation(number, request, content, updates)

    def score(
        self, sequences: Sequence[Sequence[int]], top: int = 0, routing: bool = False
    ) -> list[Continuation]:
        """The log-probabilities of sequences of ids, as ``prompt_logprobs``, with ``top`` of the most likely
        tokens beside each; with ``routing`` also the experts of their tokens.

        Raises:
            HexadError: ids that the model does not have.
        """

        def scored() -> list[Continuation]:
            listed = isinstance(sequences, Sequence) and not isinstance(sequences, str)
            for ids in sequences if listed else [sequences]:
                if not listed or not isinstance(ids, Sequence) or isinstance(ids, str):
                    raise HexadError(f"sequences: found {ids!r:.60}, expected lists of ids")
            prompts: list[Prompt] = [{"prompt": list(ids)} for ids in sequences]
            requests = self.requests(prompts, Sampling(tokens=0, prompt_logprobs=top, routing=routing))
            return sorted((text for _, text in self.written(requests)), key=lambda text: text.number)

        return self.shared(scored)

    def close(self) -> None:
        """Leave the world."""
        self._closed = True
        self._stack.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bound_kernels(count: int) -> None:
    """Bound the kernels that oneDNN and PyTorch keep for products on CPUs, one for each number of tokens in a
    step; both read these variables with the first product, and keep 1,024 otherwise."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(count))
