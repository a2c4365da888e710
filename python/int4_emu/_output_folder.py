"""A folder that is there whole or not at all: written beside its place, renamed at the end."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

try:
    import fcntl
except ImportError:  # not a POSIX system: two writers of one folder are then not told apart
    fcntl = None  # type: ignore[assignment]


@contextmanager
def output_folder(out: str | os.PathLike[str], *, source: Path, need: int, force: bool) -> Iterator[Path]:
    """Gives an empty folder to write into, which becomes `out` when the block ends without an exception.

    What a killed process has left is removed by the next one that writes the same folder: a lock file, which the system
    releases with its process, tells it from the work of a living one.

    Args:
        out: the folder to make; its parent must exist.
        source: the folder that is read; `out` must be neither it nor around it.
        need: bytes that will be written.
        force: replaces an `out` that holds a model.

    Raises:
        FileExistsError: `out` exists, or another process is writing it.
        OSError: no space (ENOSPC, with both sizes), no permission.
        ValueError: `out` and `source` overlap.
    """
    target = Path(os.path.abspath(out))
    _check_target(target, Path(source), force)
    work = target.parent / f".{target.name}.partial"
    with _locked(work.with_name(f"{work.name}.lock"), target):
        _remove(work)  # what a killed process has left
        work.mkdir()
        try:
            free = shutil.disk_usage(work).free
            if free < need:
                raise OSError(
                    errno.ENOSPC,
                    f"no space left: {need / 1e9:.3f} GB are needed in {target.parent}, {free / 1e9:.3f} GB are free",
                )
            with _terminated_as_interrupt():
                yield work
                _publish(work, target, force)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


def _check_target(target: Path, source: Path, force: bool) -> None:
    here, there = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if here == there or here.is_relative_to(there) or there.is_relative_to(here):
        raise ValueError(f"the output folder {target} must lie apart from the checkpoint {source}")
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(target.parent))
    if not os.path.lexists(target) or _is_empty_folder(target):
        return
    if not force:
        raise FileExistsError(f"{target} exists already (--force, or force=True, replaces it)")
    if not target.is_dir() or target.is_symlink() or not (target / "config.json").is_file():
        raise FileExistsError(f"{target} is not a model folder (it has no config.json) and is not replaced")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def _locked(lock: Path, target: Path) -> Iterator[None]:
    """Holds a lock file, which the system lets go of when its process dies in whatever way."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its owner may have finished, and removed the name, between our open and our lock.
                mine = os.path.samestat(os.fstat(handle), os.stat(lock))
            except (BlockingIOError, FileNotFoundError):
                mine = False
            if not mine:
                raise FileExistsError(f"another process is writing {target}")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _publish(work: Path, target: Path, force: bool) -> None:
    """Renames the finished folder into place; a folder that it replaces is removed only afterwards."""
    _sync(work)
    old = target.parent / f".{target.name}.replaced"
    if force and target.is_dir() and not _is_empty_folder(target):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    try:
        os.rename(work, target)
    except OSError as error:
        if old.exists() and not target.exists():
            os.rename(old, target)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(f"{target} was made by somebody else in the meantime") from None
        raise
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Makes renames inside a folder survive a power cut, where the file system offers it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the block like Ctrl-C does, so that it cleans up; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
