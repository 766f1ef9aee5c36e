"""Ids to text as they come: what is certain is passed on, what the next id may still change is held back. No
torch."""

from collections.abc import Sequence

from hexad.dataset.text.tokenizer import Tokenizer

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 32
"""Ids that are held back at most: bytes that are no UTF-8 come out as they are then."""


class TextStream:
    """The text of a sequence's new ids, up to a text at which it ends.

    Attributes:
        stopped: whether such a text has come.

    Args:
        tokenizer: of the ids.
        stop: texts at which it ends.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._ids: list[int] = []
        # Ids up to _begin are of no use any more; the text of those up to _end was passed on to _hold.
        self._begin = self._end = 0
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Add an id; returns the new text that is certain."""
        self._ids.append(token)
        self._held += self._decoded(last=False)
        return self._passed()

    def end(self) -> str:
        """The rest of the text."""
        self._held += self._decoded(last=True)
        text = self._passed()
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _decoded(self, last: bool) -> str:
        """The text of ids since the last ones whose text is known. It is decoded after some that are known:
        tokenizers write the beginning of a text differently."""
        before = self._tokenizer.decode(self._ids[self._begin : self._end])
        text = self._tokenizer.decode(self._ids[self._begin :])
        unsure = text.endswith(_UNKNOWN) and len(self._ids) - self._end < _LONGEST
        if (unsure and not last) or len(text) <= len(before):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return text[len(before) :]

    def _passed(self) -> str:
        """What cannot become part of a text to stop at."""
        if self.stopped:
            return ""
        places = [place for place in map(self._held.find, self._stop) if place >= 0]
        if places:
            self.stopped = True
            text, self._held = self._held[: min(places)], ""
            return text
        keep = max((_overlap(self._held, text) for text in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which ``stop`` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
