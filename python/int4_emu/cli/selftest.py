"""`int4-emu selftest`: does everything that is present compute the right numbers on this machine?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator

import torch
from rich.console import Console

from .. import _library
from ..backends import all_backends
from ..quant_config import MoEConfig, QuantConfig
from ._checks import Result, check_backend, check_ops
from ._console import console, say
from .report import devices

HELP = "check every op, format, activation and backend on this machine against the reference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `selftest`."""
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="only this backend (may be given again)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compiled backends and one format alone: seconds, for a health check",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="a line for each case instead of each op and format"
    )


def main(args: argparse.Namespace) -> int:
    """Prints a line per op, format and backend; status 1 where one fails or the compiled library does not load."""
    known = all_backends()
    if unknown := [n for n in args.backend or () if n not in known]:
        raise ValueError(f"--backend must be one of {', '.join(known)}, got {', '.join(unknown)}")
    # Problems this small take longer to hand out to threads than to solve; `check_backend` uses threads where it tells.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(args)
    finally:
        torch.set_num_threads(threads)


def _run(args: argparse.Namespace) -> int:
    known = all_backends()
    out, start = console(), time.perf_counter()
    wanted = args.backend or [n for n, b in known.items() if b.is_compiled or not args.quick]
    failed = cases = lines = 0
    missing = False
    if _library.is_compiled():
        say(
            out,
            f"compiled library: {_library.build_info()}; CPU kernels: {_library.cpu_isa()[0] or _library.cpu_isa()[1]}",
        )
        if args.backend is None or "cpu" in wanted:
            ran, bad, count = _report(out, check_ops(quick=args.quick), args.verbose)
            lines, failed, cases = lines + ran, failed + bad, cases + count
    else:
        missing = args.backend is None
        say(out, f"{'FAIL' if missing else 'skip'}  the ops are not tested since {_library.load_error()}")
    for device, name in devices():
        for backend in wanted:
            reasons = _reasons(backend, device)
            if reasons:
                say(out, f"skip  {backend} on {device}: {'; '.join(reasons)}")
                continue
            where = "" if device.type == "cpu" else f" on {device} ({name})"
            results = check_backend(backend, device, all_dtypes=known[backend].is_compiled, quick=args.quick)
            ran, bad, count = _report(out, results, args.verbose, where)
            lines, failed, cases = lines + ran, failed + bad, cases + count
    seconds = time.perf_counter() - start
    if failed or missing or not cases:
        what = (
            "nothing was tested"
            if not cases
            else f"{failed} of {cases} cases failed"
            if failed
            else "the compiled library is missing"
        )
        say(out, f"FAILED: {what} ({seconds:.1f} s)", "bold red")
        return 1
    say(out, f"passed: {cases} cases in {lines} lines ({seconds:.1f} s)", "bold green")
    return 0


def _reasons(backend: str, device: torch.device) -> list[str]:
    """Why a backend cannot be tested on a device: it serves a plain layer there neither packed nor dequantised."""
    implementation = all_backends()[backend]
    quant = QuantConfig.int4_w4a16(group_size=32)
    packed = implementation.is_supported(MoEConfig(128, 96, 4, 2, torch.bfloat16, device, quant), "packed")
    dense = implementation.is_supported(MoEConfig(128, 96, 4, 2, torch.bfloat16, device, None), "dequantized")
    return packed if packed and dense else []


def _report(out: Console, results: Iterable[Result], verbose: bool, where: str = "") -> tuple[int, int, int]:
    """Prints as results come in; (lines, failed cases, cases)."""
    lines = failed = cases = 0
    for group in _groups(results):
        bad = [r for r in group if not r.passed]
        lines, failed, cases = lines + 1, failed + len(bad), cases + len(group)
        worst = max(group, key=lambda r: r.error / r.limit if r.limit else r.error)
        told = (
            f"worst error {worst.error:.1e}, limit {worst.limit:.0e}"
            if worst.limit
            else "bit-equal"
            if not bad
            else "not bit-equal"
        )
        state = "FAIL" if bad else "ok  "
        first = group[0]
        if not verbose:
            plural = "s" if len(group) > 1 else ""
            say(
                out,
                f"{state}  {first.subject + where:10} {first.what:48} {len(group):4} case{plural}, {told}",
                "red" if bad else None,
            )
        for r in group if verbose else bad[:5]:
            detail = r.failure or f"error {r.error:.2e}, limit {r.limit:.0e}"
            say(
                out,
                f"{'ok  ' if r.passed else 'FAIL'}  {r.subject + where:10} {r.what}: {r.case}: {detail}",
                None if r.passed else "red",
            )
        if not verbose and len(bad) > 5:
            say(out, f"      ... and {len(bad) - 5} more", "red")
    return lines, failed, cases


def _groups(results: Iterable[Result]) -> Iterator[list[Result]]:
    """Cases of one op and format, which follow each other or interleave within one format's block."""
    pending: dict[tuple[str, str], list[Result]] = {}
    block = None
    for result in results:
        # The last words name the format: all its ops are finished when another format begins.
        now = result.what.partition(" ")[2]
        if block is not None and now != block:
            yield from pending.values()
            pending = {}
        block = now
        pending.setdefault((result.subject, result.what), []).append(result)
    yield from pending.values()
