"""What the numeric tests run on: the same cases judge every implementation that is present."""

from __future__ import annotations

from types import ModuleType

import int4_emu
from int4_emu import ops as compiled_ops
from int4_emu import reference as reference_ops

# Both modules offer each op under one name.
IMPLEMENTATIONS: dict[str, ModuleType] = {"reference": reference_ops}
if int4_emu.is_compiled():
    IMPLEMENTATIONS["cpu"] = compiled_ops
