"""Write a new text into a file that somebody uses: its owner, its names and a backup stay.

The standard library can replace a file, and copy its permissions; it has nothing that does both,
keeps hard links and gives the old text back where the new one cannot be written.
"""

import errno
import itertools
import os
import stat
import tempfile
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path

from ..messages.errors import reason_of


class HalfWritten(OSError):
    """A file could be neither written nor written back; its backup is whole."""

    def __init__(self, reason: str, backup: Path):
        super().__init__(reason)
        self.backup = backup


def replace_file(path: Path, old: bytes, new: bytes) -> Path:
    """Write ``new`` to a file that holds ``old``; its backup, which is whole before that begins.

    The file keeps owner, group, permissions and hard links. With one link it is replaced as a
    whole, by a file that is whole. With several, or where the owner of a new file cannot be the
    same, it is written in place, and written back when that fails: nothing but a crash leaves it
    half written, beside its backup.

    Raises ``OSError``; the folder is then as it was, unless it is a ``HalfWritten``.
    """
    if not os.access(path, os.W_OK):  # replacing it would go around that
        raise PermissionError(errno.EACCES, "the file is write-protected")
    with ExitStack() as undo:
        backup = _backup(path)
        undo.callback(backup.unlink)
        _fill(backup, old)
        if not _take_after(backup, path) or path.stat().st_nlink > 1:
            with path.open("r+b", buffering=0) as stream:
                undo.pop_all()
                _write_or_write_back(stream, old, new, backup)
            return backup
        descriptor, name = tempfile.mkstemp(prefix=".segckpt-", dir=path.parent)
        os.close(descriptor)
        temporary = Path(name)
        undo.callback(temporary.unlink)
        _fill(temporary, new)
        _take_after(temporary, path)
        os.replace(temporary, path)
        undo.pop_all()
    return backup


def _write_or_write_back(stream: FileIO, old: bytes, new: bytes, backup: Path) -> None:
    try:
        _write(stream, new)
    except BaseException as error:
        try:
            _write(stream, old)
        except OSError:
            raise HalfWritten(reason_of(error) or "interrupted", backup) from error
        backup.unlink()
        raise


def _backup(path: Path) -> Path:
    """An empty new file beside ``path``, which only its owner can read as yet."""
    for number in itertools.count():
        backup = path.with_name(f"{path.name}.bak{number or ''}")
        try:
            backup.touch(0o600, exist_ok=False)
        except FileExistsError:
            continue
        return backup
    raise AssertionError  # there is always another number


def _fill(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as stream:
        _write(stream, data)


def _write(stream: FileIO, data: bytes) -> None:
    """Make ``data`` all that is in a file, and have it on the disk."""
    stream.seek(0)
    rest = memoryview(data)
    while rest:
        rest = rest[stream.write(rest) :]
    stream.truncate()
    os.fsync(stream.fileno())


def _take_after(copy: Path, path: Path) -> bool:
    """Give ``copy`` the owner, the group, the access list and the permissions of ``path``.

    Whether it has owner and group; without them, it gives no permissions to its own group.
    """
    wanted, mine = path.stat(), copy.stat()
    if (mine.st_uid, mine.st_gid) != (wanted.st_uid, wanted.st_gid):
        with suppress(OSError):  # not permitted
            os.chown(copy, wanted.st_uid, wanted.st_gid)
            mine = wanted
    same = (mine.st_uid, mine.st_gid) == (wanted.st_uid, wanted.st_gid)
    if same:
        _copy_attributes(path, copy)
    permissions = stat.S_IMODE(wanted.st_mode)
    copy.chmod(permissions if same else permissions & 0o707)  # last: it is what chown takes away
    return same


def _copy_attributes(path: Path, copy: Path) -> None:
    """Extended attributes, in which Linux has access lists, as far as the file system has them."""
    names: list[str] = []
    with suppress(OSError, AttributeError):  # the latter on other systems
        names = os.listxattr(path)
    for name in names:
        with suppress(OSError):
            os.setxattr(copy, name, os.getxattr(path, name))
