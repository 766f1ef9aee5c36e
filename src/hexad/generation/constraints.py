"""Texts that conform to a JSON schema: the ``llguidance`` package says which tokens may follow."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hexad.config import ConfigError, HexadError
from hexad.dataset.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TiktokenTokenizer, Tokenizer

_FORM = {"whitespace_flexible": False}
"""Of the texts: with optional white space, a model may write nothing else."""


class JsonConstraint:
    """Which tokens may follow in one text: a :class:`~hexad.generation.sampler.Constraint`."""

    def __init__(self, matcher: Any, vocab: int, end: int) -> None:
        self._matcher, self._vocab, self._end = matcher, vocab, end

    def allowed(self, device: torch.device) -> Tensor:
        """bool ``[vocab]``."""
        bits = np.unpackbits(
            np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        allowed = bits[: self._vocab].astype(bool)
        allowed[self._end] |= not allowed.any()  # the text is complete, or cannot be completed
        return torch.from_numpy(allowed).to(device)

    def accept(self, token: int) -> None:
        """Add a token to the text."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class Constraints:
    """Makes the constraints of one model's texts.

    Args:
        tokenizer: of the texts.
        vocab: ids of the model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._of_tokenizer = lru_cache(maxsize=1)(self._loaded)

    def check(self, schema: str) -> None:
        """See whether a schema can be used.

        Raises:
            HexadError: it cannot, or ``llguidance`` is not installed.
        """
        guide, tokenizer = _package(), self._of_tokenizer()
        try:
            grammar = guide.LLMatcher.grammar_from_json_schema(schema, overrides=_FORM)
            wrong, problems = guide.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        except ValueError as error:
            wrong, problems = True, [str(error)]
        if wrong:
            problem = " ".join(problems[0].split())[:200]
            raise ConfigError("--schema", f"found one that cannot be used: {problem}")

    def __call__(self, schema: str) -> JsonConstraint:
        """The constraint of a new text."""
        guide = _package()
        grammar = guide.LLMatcher.grammar_from_json_schema(schema, overrides=_FORM)
        assert self._tokenizer.eod is not None, "the schema was not checked"
        return JsonConstraint(
            guide.LLMatcher(self._of_tokenizer(), grammar), self._vocab, self._tokenizer.eod
        )

    def _loaded(self) -> Any:
        guide, tokenizer = _package(), self._tokenizer
        end = tokenizer.eod
        if end is None:
            raise ConfigError("--schema", f"{tokenizer.name} has no token that ends a text")
        if isinstance(tokenizer, HuggingFaceTokenizer):
            return guide.LLTokenizer(tokenizer.backend.to_str(), n_vocab=self._vocab, eos_token=end)
        if isinstance(tokenizer, TiktokenTokenizer):
            from llguidance.tiktoken import lltokenizer_from_encoding

            return lltokenizer_from_encoding(tokenizer.backend, n_vocab=self._vocab, eos_token=end)
        if isinstance(tokenizer, ByteTokenizer):
            return guide.LLTokenizer(guide.TokenizerWrapper(_Bytes(end)), n_vocab=self._vocab)
        raise ConfigError(
            "--schema", f"cannot be used with {tokenizer.name}, a tokenizer of {tokenizer.kind}"
        )


class _Bytes:
    """The byte tokenizer as ``llguidance`` wants one."""

    def __init__(self, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, None
        self.tokens = [*(bytes([value]) for value in range(256)), b"\xff<end>"]
        self.special_token_ids = [end]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _package() -> Any:
    try:
        import llguidance
    except ImportError:
        raise HexadError("--schema: needs the llguidance package: pip install 'hexad[constraints]'") from None
    return llguidance
