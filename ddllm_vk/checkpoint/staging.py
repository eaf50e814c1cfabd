"""Where a model is written before it is one: a hidden folder beside the target, renamed to it when everything is there.

`.<name>.partial/` holds a lock, a journal and `model/`, which becomes the target. A process killed at any moment leaves
only that; the next run of the same job finds in the journal which tensors are complete.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError

_LOCK, _JOURNAL, _NEW_JOURNAL, _MODEL = "lock", "journal.jsonl", "journal.new", "model"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError inside into a CheckpointError about `path`."""
    try:
        yield
    except OSError as e:
        if e.errno in _FULL:
            raise CheckpointError(f"{path}: the disk is full; free some space and run the command again") from None
        if e.errno == errno.EFBIG:
            raise CheckpointError(f"{path}: the file would be larger than this system allows") from None
        raise CheckpointError(f"{path}: cannot be written ({e.strerror}); choose another target") from None


class Staging:
    """The hidden folder of one target, locked by this process. Made by `staging`."""

    def __init__(self, target: Path, folder: Path):
        self.target, self.folder = target, folder
        self.model = folder / _MODEL
        self.done: dict[str, int] = {}  # tensor -> crc32 of its bytes, complete in self.model
        self.restarted = False  # whether an earlier, different job's remains were thrown away

    def begin(self, job: str) -> None:
        """Continues the journal if it is this job's, else starts over. `job`: digest of all that decides the result."""
        journal = self.folder / _JOURNAL
        with writing(self.folder):
            lines = _read_lines(journal)
            if lines and lines[0].get("job") == job and self.model.is_dir():
                self.done = {line["tensor"]: line["crc32"] for line in lines[1:]}
            else:
                self.restarted = bool(lines)
                shutil.rmtree(self.model, ignore_errors=True)
                journal.unlink(missing_ok=True)
                self.model.mkdir()
            # written anew: a line that a kill has cut in half must not run into the next one
            kept = [{"job": job}, *({"tensor": name, "crc32": crc} for name, crc in self.done.items())]
            replacement = self.folder / _NEW_JOURNAL
            replacement.write_text("".join(json.dumps(line) + "\n" for line in kept))
            replacement.replace(journal)

    def record(self, tensor: str, crc32: int) -> None:
        """Notes that a tensor's bytes are all written; verification finds out if the disk lost them after all."""
        self.done[tensor] = crc32
        with writing(self.folder / _JOURNAL), open(self.folder / _JOURNAL, "a") as f:
            f.write(json.dumps({"tensor": tensor, "crc32": crc32}) + "\n")

    def require_space(self, need: int) -> None:
        """Raises CheckpointError unless `need` more bytes fit on the disk."""
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise CheckpointError(
                f"{self.target}: needs {need / 1e6:,.2f} MB more, but only {free / 1e6:,.2f} MB are free on that disk; "
                "free some space or choose another target"
            )

    def publish(self) -> None:
        """Makes the finished model the target."""
        with writing(self.target):
            sync_folder(self.model)
            os.rename(self.model, self.target)
            sync_folder(self.target.parent)
        self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _read_lines(journal: Path) -> list[dict]:
    lines = []
    try:
        for line in journal.read_bytes().splitlines():
            lines.append(json.loads(line))
    except (FileNotFoundError, ValueError):  # a line that a kill has cut in half ends the journal
        pass
    return lines


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def staging(target: Path) -> Iterator[Staging]:
    """Locks the hidden folder of `target`.

    An error inside removes the folder: nothing half-written stays. An interrupt (or a kill) leaves it, to be continued.
    Raises CheckpointError when the target exists, cannot be written, or is being written by another process.
    """
    target = target.resolve()
    folder = target.parent / f".{target.name}.partial"
    with writing(target):
        if _occupied(target):
            if not (folder / _MODEL).exists():  # left by a kill right after the rename
                shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(f"{target}: exists already; remove it or choose another target")
        target.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and (
            not folder.is_dir() or set(os.listdir(folder)) - {_LOCK, _JOURNAL, _NEW_JOURNAL, _MODEL}
        ):
            raise CheckpointError(f"{folder}: is in the way; move it elsewhere")
        lock = _lock(folder)
    try:
        if _occupied(target):  # another process has just finished it
            raise CheckpointError(f"{target}: exists already; remove it or choose another target")
        yield Staging(target, folder)
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _occupied(target: Path) -> bool:
    return target.exists() and (not target.is_dir() or bool(os.listdir(target)))


def _lock(folder: Path) -> int:
    """An open descriptor holding the lock of `folder`, which is made if need be."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # its owner has just removed the folder
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the lock counts only if its file is still the one in the folder
            if os.path.samestat(os.fstat(fd), os.stat(folder / _LOCK)):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise CheckpointError(f"{folder}: another process is writing this model; wait until it is done") from None
        except FileNotFoundError:
            pass
        os.close(fd)
