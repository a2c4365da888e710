"""Which checkpoint a layer came from, in a short text that the ranks of a group can compare."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ._shards import TensorFiles

_SAMPLE = 4096  # values of each tensor


def layer_fingerprint(config: dict[str, Any], files: TensorFiles, number: int, block: str) -> str:
    """Says the layer and a hash of the configuration, of every header, and of the first values of what lies beside the layer's experts
    (router, shared experts). The experts themselves are not read: each rank has others."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for info in sorted(files.infos.values(), key=lambda i: i.name):
        digest.update(f"{info.name} {info.stored_dtype} {info.shape}\n".encode())
        if not info.name.startswith(f"{block}.") or info.name.startswith(f"{block}.experts."):
            continue
        if info.dtype is not None and info.shape and info.numel:
            cuts = (slice(0, 1), slice(0, _SAMPLE)) if len(info.shape) > 1 else (slice(0, _SAMPLE),)
            digest.update(files.get_slice(info.name, cuts).float().numpy().tobytes())
    return f"layer {number} of checkpoint {digest.hexdigest()[:12]}"
