"""The plug-ins in their real hosts: `make host-check`. Part by part, on this machine's CPU.

    python tests/host_check.py [PART ...]

The first run builds the host's environment in .hosts (about 3 GB). Ends with one line that says of each part that it ran, or why it
was skipped, or that it failed. Exit status: 0 all asked parts ran and held; 1 one failed; 3 one was skipped.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "hosts"))
import vllm_environment as environment
from vllm_environment import Failure, Skip


def parts() -> dict[str, Callable[[], str]]:
    """Every part by name, in the order in which they run."""
    import vllm_parts
    import vllm_serving

    return {
        "vllm-greedy": vllm_parts.greedy,
        "vllm-compile": vllm_parts.compiled,
        "vllm-server": vllm_serving.server,
        "vllm-parallel": vllm_parts.parallel,
        "vllm-perplexity": vllm_parts.perplexity,
        "vllm-checkpoints": vllm_parts.checkpoints,
        "vllm-off": vllm_parts.switched_off,
        "vllm-emulation": vllm_parts.emulation,
        "vllm-two-claims": vllm_parts.two_claims,
        "vllm-example": vllm_serving.example,
        "vllm-speed": vllm_serving.speed,
    }


def run_part(part: Callable[[], str]) -> tuple[str, str]:
    """(ran, skipped or FAILED; what it showed or why)."""
    try:
        return "ran", part()
    except Skip as reason:
        return "skipped", str(reason)
    except Failure as failure:
        return "FAILED", str(failure)
    except Exception:
        return "FAILED", traceback.format_exc()


def exit_status(results: Mapping[str, str]) -> int:
    """1 where a part failed, 3 where one was skipped, else 0."""
    states = set(results.values())
    return 1 if "FAILED" in states else 3 if "skipped" in states else 0


def main(names: list[str]) -> int:
    known = parts()
    if unknown := [n for n in names if n not in known]:
        print(f"host-check: parts are {', '.join(known)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    try:
        environment.prepare()
    except Failure as failure:
        print(f"host-check: FAILED: the environment: {failure}")
        return 1
    results = {}
    for name in names or known:
        start = time.perf_counter()
        results[name], told = run_part(known[name])
        print(f"{name}: {results[name]} ({time.perf_counter() - start:.0f} s): {told}", flush=True)
    print("host-check: " + " ".join(f"{name}={state}" for name, state in results.items()))
    return exit_status(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
