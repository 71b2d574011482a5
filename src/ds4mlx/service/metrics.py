"""What a user asks about speed: when each phase of a request began, and the rates that follow."""
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timings:
    """Moments of one request, seconds of the monotonic clock; None: not reached."""
    queued: float = field(default_factory=time.monotonic)
    started: float | None = None      # left the queue
    prefilled: float | None = None    # the prompt is in the session
    first_token: float | None = None
    finished: float | None = None

    @property
    def total_s(self) -> float:
        return (self.finished or time.monotonic()) - self.queued

    def prefill_tps(self, tokens: int) -> float:
        """Computed prompt tokens per second; 0 when nothing was computed."""
        return _rate(tokens, self.started, self.prefilled)

    def decode_tps(self, tokens: int) -> float:
        """Tokens per second after the first one."""
        return _rate(tokens - 1, self.first_token, self.finished)


def _rate(tokens: int, start: float | None, end: float | None) -> float:
    if start is None or end is None or tokens <= 0 or end <= start:
        return 0.0
    return tokens / (end - start)
