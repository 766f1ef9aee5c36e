"""Texts that conform to a grammar: the ``llguidance`` package says which tokens may follow."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hexad.config import ConfigError
from hexad.dataset.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TiktokenTokenizer, Tokenizer

_LARGEST = 256 * 2**10
"""Bytes of a grammar: the time that compiling takes grows with their square (2 s)."""
_KEPT = 16
"""Compiled grammars that are kept."""
_PROBED = 2
_MOST_ITEMS = 10_000
"""Items of a row of the parser, four for each property of an object that may follow."""


class GrammarConstraint:
    """Selects the tokens that may follow in one text: a :class:`~hexad.generation.sampler.Constraint`."""

    def __init__(self, compiled: Future[Any], vocab: int, end: int) -> None:
        self._compiled, self._vocab, self._end = compiled, vocab, end

    @cached_property
    def _matcher(self) -> Any:
        return self._compiled.result().deep_copy()

    def allowed(self, device: torch.device) -> Tensor | None:
        """bool ``[vocab]``; None if the grammar is too complex to go on."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return None
        allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        allowed = allowed[: self._vocab].astype(bool)
        allowed[self._end] |= not allowed.any()  # the text is complete, or cannot be completed
        return torch.from_numpy(allowed).to(device)

    def accept(self, token: int) -> None:
        """Add a token to the text."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class Constraints:
    """Makes the constraints of one model's texts. A grammar is compiled once for all of them.

    Args:
        tokenizer: of the texts.
        vocab: ids of the model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._lock = threading.Lock()
        self._compiled = lru_cache(maxsize=_KEPT)(self._begun)

    def check(self, grammar: str, field: str = "schema") -> None:
        """Compile a grammar; ``field`` is the setting that it follows from, for messages.

        Raises:
            HexadError: it cannot be used, or ``llguidance`` is not installed.
        """
        if len(grammar) > _LARGEST:
            problem = f"found one of {len(grammar):,} bytes, expected at most {_LARGEST:,}"
            raise ConfigError(field, problem)
        _package(field)
        try:
            matcher = self._future(grammar).result().deep_copy()
        except ConfigError as error:  # of the tokenizer
            raise ConfigError(field, error.problem) from None
        for _ in range(_PROBED):  # what every text begins with leads to the most complex places
            if not matcher.is_error():
                matcher.consume_tokens(matcher.compute_ff_tokens())
                matcher.compute_bitmask()
        if matcher.is_error():
            problem = " ".join(matcher.get_error().split())[:200]
            raise ConfigError(field, f"found one that cannot be used: {problem}")

    def named(self, field: str = "schema") -> dict[str, int]:
        """The ids of tokens that grammars have to name, by their text: no other tokens spell it. ``field`` is
        the setting that asks for a grammar.

        Raises:
            ConfigError: the tokenizer cannot be used, or ``llguidance`` is not installed.
        """
        _package(field)
        try:
            return self._named
        except ConfigError as error:
            raise ConfigError(field, error.problem) from None

    @cached_property
    def _named(self) -> dict[str, int]:
        tokenizer = self._tokenizer
        added = dict(tokenizer.specials)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            known = tokenizer.backend.get_added_tokens_decoder()
            added |= {token.content: number for number, token in known.items()}
        return {text: n for text, n in added.items() if self._of_tokenizer.is_special_token(n)}

    def __call__(self, grammar: str) -> GrammarConstraint:
        """The constraint of a new text. Compiling may take a while: it does not wait for that."""
        assert self._tokenizer.eod is not None, "the grammar was not checked"
        return GrammarConstraint(self._future(grammar), self._vocab, self._tokenizer.eod)

    def _future(self, grammar: str) -> Future[Any]:
        with self._lock:
            return self._compiled(grammar)

    def _begun(self, grammar: str) -> Future[Any]:
        return self._threads.submit(self._compile, grammar)

    def _compile(self, grammar: str) -> Any:
        guide = _package()
        limits = guide.LLParserLimits(max_items_in_row=_MOST_ITEMS, verbose_errors=False)
        return guide.LLMatcher(self._of_tokenizer, grammar, log_level=0, limits=limits)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # One: the package does not hold Python's lock, and others shall go on.
        return ThreadPoolExecutor(1, thread_name_prefix="hexad-grammar")

    @cached_property
    def _of_tokenizer(self) -> Any:
        guide, tokenizer = _package(), self._tokenizer
        end = tokenizer.eod
        if end is None:
            raise ConfigError("schema", f"{tokenizer.name} has no token that ends a text")
        if isinstance(tokenizer, HuggingFaceTokenizer):
            return guide.LLTokenizer(tokenizer.backend.to_str(), n_vocab=self._vocab, eos_token=end)
        if isinstance(tokenizer, TiktokenTokenizer):
            from llguidance.tiktoken import lltokenizer_from_encoding

            return lltokenizer_from_encoding(tokenizer.backend, n_vocab=self._vocab, eos_token=end)
        if isinstance(tokenizer, ByteTokenizer):
            return guide.LLTokenizer(guide.TokenizerWrapper(_Bytes(end)), n_vocab=self._vocab)
        raise ConfigError("schema", f"cannot be used with {tokenizer.name}, a tokenizer of {tokenizer.kind}")


class _Bytes:
    """The byte tokenizer as ``llguidance`` wants one."""

    def __init__(self, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, None
        self.tokens = [*(bytes([value]) for value in range(256)), b"\xff<end>"]
        self.special_token_ids = [end]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _package(field: str = "schema") -> Any:
    try:
        import llguidance
    except ImportError:
        problem = "needs the llguidance package: pip install 'hexad[constraints]'"
        raise ConfigError(field, problem) from None
    return llguidance
