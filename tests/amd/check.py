"""The AMD build without an AMD GPU: `make amd-check`, in four parts.

a  clang 19 and HIP 5.2.3 of Debian 12 compile and link every GPU file
b  hipcc 7.0.2 in a Debian tree of its own: warnings as errors, gates on registers, memory, instructions
c  setup.py builds the ROCm extension in that tree, and it loads
d  a recording runtime checks every launch

Ends with one line. Exit status: 0 all parts ran and held; 1 a check failed; 3 a part was skipped (0 with INT4_EMU_AMD_ALLOW_SKIP=1).
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from amd import debian, gates, launches, rocm_build, tree
from amd.common import WORK, Failure, Skip

PARTS = "abcd"


def result_line(results: Mapping[str, str]) -> str:
    """The line that closes a run."""
    return "amd-check: " + " ".join(f"{part}={results[part]}" for part in PARTS)


def exit_status(results: Mapping[str, str], allow_skip: bool) -> int:
    """1 where a part failed, 3 where one was skipped and may not be, else 0."""
    if any(not (r == "ran" or r.startswith("skipped")) for r in results.values()):
        return 1
    return 3 if any(r != "ran" for r in results.values()) and not allow_skip else 0


RUN: dict[str, Callable[[bool], object]] = {
    "a": debian.compile_all,
    "b": lambda install: gates.check_all(tree.obtain(install)),
    "c": lambda install: rocm_build.run(tree.obtain(install), WORK),
    "d": lambda install: launches.check(),
}


def run_part(part: str, install: bool) -> str:
    """What became of a part: ran, skipped(why) or FAILED; the reason of a failure is printed."""
    try:
        RUN[part](install)
    except Skip as reason:
        return f"skipped({reason})"
    except Failure as failure:
        print(f"{part}: FAILED\n{failure}")
        return "FAILED"
    except Exception:
        print(f"{part}: FAILED\n{traceback.format_exc()}")
        return "FAILED"
    return "ran"


def main() -> int:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=PARTS, help="of a, b, c, d; the others are skipped")
    parser.add_argument("--install", action="store_true", help="install missing Debian packages (as root)")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    packages = [*debian.PACKAGES, "mmdebstrap"]
    print(
        f"needs, on Debian 12 as root: apt-get install -y --no-install-recommends {' '.join(packages)}   (or --install)"
    )
    results = {
        p: run_part(p, options.install) if p in options.parts else "skipped(not asked for)" for p in PARTS
    }
    print(result_line(results))
    return exit_status(results, os.environ.get("INT4_EMU_AMD_ALLOW_SKIP") == "1")


if __name__ == "__main__":
    sys.exit(main())
