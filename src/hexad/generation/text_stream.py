"""The text of a sequence as its ids come, up to a text that stops it. No torch."""

from collections.abc import Sequence

from hexad.dataset.text.token_text import TextDecoder


class TextStream:
    """The text of a sequence's new ids, up to a text at which it ends.

    Attributes:
        stopped: whether such a text has come.

    Args:
        decoder: of the new ids.
        specials: the texts of special tokens by id. They are not part of the text, but texts that stop it may
            contain them.
        stop: texts at which it ends.
    """

    def __init__(self, decoder: TextDecoder, specials: dict[int, str], stop: Sequence[str] = ()) -> None:
        self._decoder, self._specials = decoder, specials
        self._stop = [text for text in stop if text]
        # What may still become part of a text that stops it, and which of its characters are hidden.
        self._held, self._hidden = "", b""
        self.stopped = False

    def add(self, token: int) -> str:
        """Add an id; returns the new text that is certain."""
        text = self._decoder.add(token).text
        if not self._stop:
            return text
        special = self._specials.get(token, "")
        self._held += text + special
        self._hidden += bytes(len(text)) + b"\1" * len(special)
        return self._passed()

    def end(self) -> str:
        """The rest of the text."""
        if self.stopped:
            return ""
        text = self._decoder.end()
        self._held += text
        self._hidden += bytes(len(text))
        return self._passed() + self._cut(len(self._held))

    def _passed(self) -> str:
        """What cannot become part of a text to stop at."""
        if self.stopped:
            return ""
        places = [place for place in map(self._held.find, self._stop) if place >= 0]
        if places:
            self.stopped = True
            text = self._cut(min(places))
            self._held, self._hidden = "", b""
            return text
        keep = max((_overlap(self._held, text) for text in self._stop), default=0)
        return self._cut(len(self._held) - keep)

    def _cut(self, length: int) -> str:
        """Remove some characters at the beginning; returns those that are not hidden."""
        text = "".join(char for char, hidden in zip(self._held[:length], self._hidden) if not hidden)
        self._held, self._hidden = self._held[length:], self._hidden[length:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which ``stop`` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
