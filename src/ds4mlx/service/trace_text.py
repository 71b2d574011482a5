"""A request's account as text for people."""
import time

from ds4mlx.service.trace_records import Asked, Decided, Differing, Finished, Happened, Record, Sampled, Token


class TextAccount:
    """Records of one request -> what to write for each, in the order that they come in.

    What was asked waits for the decision that follows it: the first lines tell of both.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._asked: Asked | None = None
        self._line_ended = True     # of the generated text, which is written as it comes

    def __call__(self, record: Record) -> bytes:
        match record:
            case Asked():
                self._asked = record
                return b""
            case Sampled():
                self._line_ended = record.text.endswith(b"\n")
                return record.text
            case Decided():
                return self._encoded(self._decided(record))
            case Happened():
                return self._encoded(self._opening(None) + f"--- trace: {record.event} ---\n")
            case Finished():
                return self._encoded(self._opening(None) + self._finished(record))

    def _encoded(self, text: str) -> bytes:
        """On a line of its own."""
        text, self._line_ended = text if self._line_ended else "\n" + text, True
        return text.encode("utf-8", "backslashreplace")

    def _decided(self, record: Decided) -> str:
        asked = self._asked
        text = self._opening(record) + _decision(record)
        if any(row.live != row.prompt for row in record.first_mismatch):
            text += "--- first mismatch ---\n" + "".join(map(_row, record.first_mismatch))
        if asked is not None:
            text += f"--- raw request json ---\n{asked.raw}\n--- rendered prompt ---\n{asked.prompt}\n"
        return text + "--- generated text ---\n"

    def _opening(self, decided: Decided | None) -> str:
        """The first lines, once."""
        asked, self._asked = self._asked, None
        if asked is None:
            return ""
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(asked.time))
        text = (f"===== request {self._number} {date} =====\n"
                f"id: {asked.id}\n"
                f"kind: {asked.kind}  api: {asked.api}  model: {asked.model}  stream: {asked.stream:d}  "
                f"tools: {asked.tools}\n"
                f"think_mode: {asked.think_mode}  prompt_tokens: {asked.prompt_tokens}")
        if decided is not None:
            text += (f"  effective_prompt_tokens: {decided.effective_prompt_tokens}  "
                     f"cached_tokens: {decided.cached_tokens}")
        return text + (f"\nmax_tokens: {asked.max_tokens}  temperature: {asked.temperature:g}  top_k: {asked.top_k}  "
                       f"top_p: {asked.top_p:g}  min_p: {asked.min_p:g}  seed: {asked.seed}\n\n")

    def _finished(self, record: Finished) -> str:
        text = (f"--- parsed message ---\n"
                f"finish: {record.finish}  generated_tokens: {record.generated_tokens}  "
                f"reasoning_tokens: {record.reasoning_tokens}  seconds: {record.seconds}  "
                f"prefill: {record.prefill_tps} t/s  decode: {record.decode_tps} t/s\n")
        parts = [("error", record.error), ("reasoning", record.reasoning), ("content", record.content)]
        text += "".join(f"{name}: {part}\n" for name, part in parts if part)
        for i, call in enumerate(record.tool_calls):
            text += f"tool_call[{i}]: id: {call.id}  name: {call.name}\n{call.arguments}\n"
        return text + f"===== end request {self._number} =====\n\n"


def _decision(record: Decided) -> str:
    replay = " ".join(f"{name}={count}" for name, count in record.tool_replay.items())
    lines = [
        "--- cache decision ---", f"slot: {record.slot}" + _other(record),
        f"live_tokens_before: {record.live_tokens_before}  live_prompt_common: {record.live_prompt_common}  "
        f"memory_token_reusable: {record.memory_token_reusable:d}",
        f"memory_miss_reason: {record.memory_miss_reason}", f"tool_replay: {replay}",
        f"cache_source: {record.cache_source}  cached_tokens: {record.cached_tokens}  "
        f"disk_cached_tokens: {record.disk_cached_tokens}",
        f"disk_cache_file: {record.disk_cache_file or '-'}",
        f"rejected: {', '.join(f'{file}={why}' for file, why in record.rejected.items()) or '-'}",
        f"attempts: {', '.join(f'{source}={outcome}' for source, outcome in record.verdicts)}"]
    if place := record.first_difference:
        lines.append(f"first_difference: {place['block']} byte {place['byte']}, beside {place['beside']}")
    if record.because:
        lines.append(f"because: {record.because}")
    return "\n".join([*lines, "", ""])


def _other(record: Decided) -> str:
    if record.donor is not None:
        return f"  shares: slot {record.donor}"
    return "" if record.beside is None else f"  compared_with: slot {record.beside}"


def _row(row: Differing) -> str:
    mark = " " if row.live == row.prompt else "*"
    return f"{row.position:8d} {mark}  {_cell(row.live):<32}  {_cell(row.prompt)}".rstrip() + "\n"


def _cell(token: Token | None) -> str:
    return "-" if token is None else f"{token.id:6d} {token.piece}"
