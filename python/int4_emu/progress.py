"""The progress bar of loading: layers, speed, peak memory."""

from __future__ import annotations

import time
from types import TracebackType

from ._memory import anonymous_bytes


class LoadProgress:
    """A tqdm bar over layers; counts silently when disabled.

    Attributes:
        bytes_read: stored bytes converted so far.
        peak_bytes: the most anonymous memory seen, 0 where the system does not tell.
    """

    def __init__(self, layers: int, *, enabled: bool) -> None:
        from tqdm import tqdm  # only a load needs it

        self._bar = tqdm(total=layers, unit="layer", desc="loading experts", disable=not enabled)
        self._start = time.perf_counter()
        self.bytes_read = 0
        self.peak_bytes = anonymous_bytes()

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._start

    def layer_done(self, bytes_read: int) -> None:
        """Counts one layer."""
        self.bytes_read += bytes_read
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes())
        speed = self.bytes_read / max(self.seconds, 1e-9) / 1e9
        self._bar.set_postfix_str(f"{speed:.2f} GB/s, peak {self.peak_bytes / 2**30:.2f} GiB", refresh=False)
        self._bar.update(1)
