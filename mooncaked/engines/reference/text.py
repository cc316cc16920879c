"""From generated tokens to text, piece by piece: whole characters, and nothing past a stop text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder puts where bytes are no whole character
_PENDING_MAX = 16  # tokens that may wait for a character to become whole; beyond it, they are no text


class Detokenizer:
    """Decodes tokens as they come. A token may hold a part of a character, and its text may depend on the
    token before it, so a small window is decoded again each time and only what is new is passed on."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens already passed on that are the context, then those pending
        self._passed = 0  # how many of the window are context
        self._known = ""  # text of the context alone

    def push(self, token: int) -> str:
        """The text that `token` completes, often with what waited before it."""
        self._window.append(token)
        text = self._decode(self._window)
        whole = not text.endswith(REPLACEMENT)
        if not whole and len(self._window) - self._passed <= _PENDING_MAX:
            return ""
        return self._pass_on(text)

    def flush(self) -> str:
        """What still waits, at the end of the answer: parts of characters become U+FFFD."""
        return self._pass_on(self._decode(self._window))

    def _pass_on(self, text: str) -> str:
        fresh = text[len(self._known) :]
        # Half a character that was given up must not become whole in the next token's window.
        self._window = [] if text.endswith(REPLACEMENT) else self._window[self._passed :]
        self._passed = len(self._window)
        self._known = self._decode(self._window)
        return fresh


class StopFinder:
    """Cuts a text that comes in pieces at the first of the stop texts, which itself is left out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""  # may be the beginning of a stop text
        self.stopped = False

    def push(self, text: str) -> str:
        """As much of what came as surely belongs to the answer."""
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        held = self._held + text
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return held[: min(found)]
        keep = self._suspicious(held)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _suspicious(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop text begins."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for count in range(longest, 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0


class AnswerText:
    """Both together, for one answer."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._finder = StopFinder(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop text came."""
        return self._finder.stopped

    def push(self, token: int) -> str:
        """The text to send after `token`."""
        return self._finder.push(self._detokenizer.push(token))

    def flush(self) -> str:
        """The rest, when no further token comes."""
        if self.stopped:
            return ""
        return self._finder.push(self._detokenizer.flush()) + self._finder.flush()
