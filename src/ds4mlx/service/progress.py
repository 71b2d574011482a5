"""The log of an answer on its way: a line for each chunk of its prompt, and for every fifty tokens that it has said."""
import logging
import time

log = logging.getLogger("ds4mlx.progress")

SAID_EVERY = 50     # tokens


class ProgressLog:
    """Of one request. Numbers only: neither prompts nor answers belong in a log."""

    def __init__(self, request: str, chunk: int) -> None:
        """chunk: prompt tokens that are computed at a time, where nobody else is to be served between them."""
        self._request, self._chunk = request, chunk
        self._tokens, self._total, self._at = 0, 0, 0.0    # as told last

    def begins(self, reused: int, total: int) -> None:
        self._tokens, self._total, self._at = reused, total, time.monotonic()

    def prefilled(self, tokens: int) -> None:
        """So many of the prompt are in the session."""
        whole_chunk = tokens // self._chunk > self._tokens // self._chunk
        if tokens > self._tokens and (whole_chunk or tokens == self._total):
            log.info("prefill %(tokens)d/%(total)d %(tps).1f t/s %(request)s", self._numbers(tokens, self._total))
        if tokens == self._total:
            self._tokens, self._at = 0, time.monotonic()

    def said(self, tokens: int) -> None:
        """So many of the answer."""
        if tokens % SAID_EVERY == 0:
            log.info("decode %(tokens)d %(tps).1f t/s %(request)s", self._numbers(tokens, None))

    def _numbers(self, tokens: int, total: int | None) -> dict[str, object]:
        """tps: tokens a second since the last line."""
        grown, before = tokens - self._tokens, self._at
        self._tokens, self._at = tokens, time.monotonic()
        numbers: dict[str, object] = {"tokens": tokens, "tps": round(grown / max(1e-6, self._at - before), 1),
                                      "request": self._request}
        return numbers if total is None else numbers | {"total": total}
