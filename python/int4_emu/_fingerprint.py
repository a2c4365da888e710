"""Which checkpoint a layer came from, in a short text that the ranks of a group can compare."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from typing import Any

from ._shards import TensorFiles

_SAMPLE = 4096  # values of each tensor


class Fingerprint:
    """A checkpoint's configuration and headers, hashed once for all its layers."""

    def __init__(self, config: dict[str, Any], files: TensorFiles) -> None:
        self._files = files
        self._names = sorted(files.infos)
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        for name in self._names:
            info = files.infos[name]
            digest.update(f"{name} {info.stored_dtype} {info.shape}\n".encode())
        self._common = digest.digest()

    def of_layer(self, number: int, block: str) -> str:
        """Says the layer and a hash of the configuration, of every header, and of the first values of what lies beside the layer's
        experts (router, shared experts). The experts themselves are not read: each rank has others."""
        digest = hashlib.sha256(self._common)
        for name in self._names[bisect_left(self._names, f"{block}.") :]:
            if not name.startswith(f"{block}."):
                break
            info = self._files.infos[name]
            if name.startswith(f"{block}.experts.") or info.dtype is None or not info.shape or not info.numel:
                continue
            cuts = (slice(0, 1), slice(0, _SAMPLE)) if len(info.shape) > 1 else (slice(0, _SAMPLE),)
            digest.update(self._files.get_slice(name, cuts).float().numpy().tobytes())
        return f"layer {number} of checkpoint {digest.hexdigest()[:12]}"
