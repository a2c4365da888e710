"""`python -m int4_emu` is the command `int4-emu`."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
