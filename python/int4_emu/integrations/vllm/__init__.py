"""The vLLM plug-in: `register` is the entry point `vllm.general_plugins`, which vLLM calls in each of its processes.

Imports vLLM only when it is called. docs/serving.md says how to use it.
"""

from __future__ import annotations

import logging
import re

# Versions of vLLM that the plug-in was run with: from the first, below the second.
TESTED_VERSIONS = ((0, 32), (0, 33))


def version_refusal(version: str) -> str | None:
    """Why the plug-in does not serve this vLLM, or None."""
    found = re.match(r"(\d+)\.(\d+)", version)
    low, high = TESTED_VERSIONS
    if found is not None and low <= (int(found[1]), int(found[2])) < high:
        return None
    return (
        f"int4_emu's plug-in works with vLLM from {low[0]}.{low[1]} and below {high[0]}.{high[1]}, which it was tested with, "
        f"and this is vLLM {version}"
    )


def register() -> None:
    """Makes the quantization method `int4_emu` known to vLLM, and serves what vLLM's own int4 and int8 methods refuse.

    Where the version of vLLM is outside the tested range only the method's name is registered, and its use raises.

    Raises:
        ValueError: another plug-in claims a name that this one needs.
    """
    import vllm

    refusal = version_refusal(vllm.__version__)
    if refusal is not None:
        from . import _refusing

        logging.getLogger("vllm.int4_emu").warning("%s: nothing is overridden.", refusal)
        _refusing.register(refusal)
        return
    from . import _registry

    _registry.register()
