"""The command line: `int4-emu` and `python -m int4_emu`.

Results go to stdout; progress and errors go to stderr. Exit status: 0 done, 1 failed (a test, the machine, a backend),
2 wrong usage or bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

# In the order of the help text. Each module has HELP, add_arguments(parser) and main(args) -> exit status.
COMMANDS = ("run", "inspect", "convert", "selftest", "bench")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every subcommand; `args.command` is None without one."""
    parser = argparse.ArgumentParser(
        prog="int4-emu",
        description="Runs int4 and int8 Mixture-of-Experts checkpoints on hardware without a native kernel. "
        "Without a command: a report on this machine and this installation.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        module = _module(name)
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
        # SUPPRESS: given before the command, the flag must survive the subparser's own default.
        sub.add_argument(
            "--traceback", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        module.add_arguments(sub)
    return parser


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments without the program's name; None = those of the process.

    Returns:
        The exit status.
    """
    _open_closed_streams()
    _never_fail_to_encode()
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed help or the usage error
        return stop.code if isinstance(stop.code, int) else 2
    try:
        if args.version:
            from .. import __version__

            print(f"int4_emu {__version__}")
            return 0
        status: int = _module(args.command or "report").main(args)
        sys.stdout.flush()  # a reader that went away shows here, not at exit
        return status
    except BrokenPipeError:
        _drop_stdout()  # `int4-emu ... | head`: nobody reads on
        return 1
    except KeyboardInterrupt:
        print("int4-emu: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.traceback:
            raise
        from ._errors import explain

        sentence, status = explain(error)
        print(f"int4-emu: {sentence}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # stdout itself is what is full
            _drop_stdout()
        return status


def _drop_stdout() -> None:
    """Keeps the interpreter from flushing into a closed pipe or a full disk at exit, which would change the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Started with `>&-`, Python has no stream at all, and the next file that is opened would get the descriptor of stdout."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (for the rest of the process)


def _never_fail_to_encode() -> None:
    """Text outside the terminal's encoding prints as `?` instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
