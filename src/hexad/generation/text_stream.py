"""The text of a sequence as its ids come, up to a text that stops it. No torch."""

from collections.abc import Container, Sequence

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
        shown: special tokens that are part of the text.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        specials: dict[int, str],
        stop: Sequence[str] = (),
        shown: Container[int] = (),
    ) -> None:
        self._decoder, self._specials, self._shown = decoder, specials, shown
        self._stop = [text for text in stop if text]
        # What may still become part of a text that stops it; of each character 0 if it is shown, else whether
        # it is the first of a special token (1) or not (2).
        self._pending, self._hidden = "", b""
        self.stopped = False

    def add(self, token: int, may_stop: bool = True) -> str:
        """Add an id, after which the text may or may not stop; returns the new text that is certain."""
        text = self._decoder.add(token).text
        special = self._specials.get(token, "")
        if token in self._shown:
            text, special = text + special, ""
        if not self._stop:
            return text
        if not may_stop:
            rest, self._pending, self._hidden = self._cut(len(self._pending)), "", b""
            return rest + text
        self._pending += text + special
        self._hidden += bytes(len(text)) + b"\1" * bool(special) + b"\2" * (len(special) - 1)
        return self._passed()

    def end(self) -> str:
        """The rest of the text."""
        if self.stopped:
            return ""
        text = self._decoder.end()
        self._pending += text
        self._hidden += bytes(len(text))
        return self._passed() + self._cut(len(self._pending))

    def _passed(self) -> str:
        """The text that cannot become part of a text to stop at."""
        if self.stopped:
            return ""
        if places := [place for stop in self._stop if (place := self._place(stop)) is not None]:
            self.stopped = True
            text = self._cut(min(places))
            self._pending, self._hidden = "", b""
            return text
        keep = max(map(self._overlap, self._stop), default=0)
        return self._cut(len(self._pending) - keep)

    def _place(self, stop: str) -> int | None:
        """The index of a text to stop at, counting only complete special tokens."""
        place = self._pending.find(stop)
        while place >= 0:
            end = place + len(stop)
            if self._hidden[place] != 2 and (end == len(self._pending) or self._hidden[end] != 2):
                return place
            place = self._pending.find(stop, place + 1)
        return None

    def _overlap(self, stop: str) -> int:
        """Characters at the end of what is held with which a text to stop at begins."""
        for count in range(min(len(self._pending), len(stop) - 1), 0, -1):
            if self._hidden[-count] != 2 and self._pending.endswith(stop[:count]):
                return count
        return 0

    def _cut(self, length: int) -> str:
        """Remove some characters at the beginning; returns those that are not hidden."""
        text = "".join(char for char, hidden in zip(self._pending[:length], self._hidden) if not hidden)
        self._pending, self._hidden = self._pending[length:], self._hidden[length:]
        return text
