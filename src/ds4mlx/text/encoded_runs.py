"""The ids of texts that were encoded lately: an agent's next request holds all of its last one again."""
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

ENTRY_BYTES = 200   # of a run beside its text and ids; 150 measured with 20,000 of them

Encode = Callable[[list[str]], Sequence[Sequence[int]]]


class EncodedRuns:
    """Runs of text -> ids, those used last, in `most_bytes` of memory. For any thread."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, array[int]] = OrderedDict()

    def encode(self, runs: Sequence[str], encode: Encode) -> list[Sequence[int]]:
        """The ids of each run; `encode` is asked for those that are not known."""
        known: dict[str, Sequence[int]] = {run: ids for run in runs if (ids := self._known(run)) is not None}
        missing = list(dict.fromkeys(run for run in runs if run not in known))
        for run, encoded in zip(missing, encode(missing) if missing else (), strict=True):
            known[run] = kept = array("I", encoded)
            self._keep(run, kept)
        return [known[run] for run in runs]

    def _known(self, run: str) -> "array[int] | None":
        with self._lock:
            ids = self._runs.get(run)
            if ids is not None:
                self._runs.move_to_end(run)
            return ids

    def _keep(self, run: str, ids: "array[int]") -> None:
        nbytes = _bytes(run, ids)
        if nbytes > self.most_bytes:
            return
        with self._lock:
            if run in self._runs:   # another thread was as quick
                return
            self._runs[run] = ids
            self.nbytes += nbytes
            while self.nbytes > self.most_bytes:
                self.nbytes -= _bytes(*self._runs.popitem(last=False))


def _bytes(run: str, ids: "array[int]") -> int:
    return sys.getsizeof(run) + len(ids) * ids.itemsize + ENTRY_BYTES
