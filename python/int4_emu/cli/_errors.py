"""Exceptions as one sentence and an exit status."""

from __future__ import annotations

import errno

from ..errors import BackendError

FAILED, BAD_INPUT = 1, 2


def explain(error: Exception) -> tuple[str, int]:
    """(one line for a person, exit status): 2 for what the caller gave, 1 for what the machine could not do."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        return _explain_os_error(error, text)
    if isinstance(error, BackendError):
        return text, FAILED
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in text
    ):
        return f"out of memory{': ' + text if text else ''}", FAILED
    if isinstance(error, (ValueError, TypeError, ImportError)):
        return text or type(error).__name__, BAD_INPUT
    return f"unexpected {type(error).__name__}: {text} (--traceback shows where)", FAILED


def _explain_os_error(error: OSError, text: str) -> tuple[str, int]:
    where = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (f"no space left to write{where}" if where else error.strerror or text), FAILED
    if error.errno == errno.EFBIG:
        return f"the file-size limit of this process is too low to write{where or ' the output'}", FAILED
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = "the file system is read-only" if error.errno == errno.EROFS else "no permission"
        return f"{reason}: {error.filename or text}", FAILED
    if isinstance(error, (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)):
        return f"{(error.strerror or text).lower()}:{where}" if where else text, BAD_INPUT
    return text, FAILED
