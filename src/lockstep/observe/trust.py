"""Which files and folders another user of this machine cannot have written.

    data = read_own(run / "lock", ConfigError, owners=[run.stat().st_uid], limit=4096)
    check_own_folder(cache_root() / "ray", advice="set cluster.temp_dir to a folder of your own")

A file counts as ours if it is a regular file, no link, that belongs to us or root and that not everybody may
write. A secret is one that nobody else may read either. A folder counts as ours if that holds for it and for
every folder above it, since whoever may rename a folder on the way can put another in its place. A folder
that everybody may write, such as /tmp, is no danger to what is in it if it is sticky (sshd's StrictModes asks
for the same, without links and sticky folders).
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Collection, Iterator
from io import BufferedReader
from pathlib import Path

from lockstep.errors import ConfigError, LockstepError
from lockstep.observe.files import JSON_BYTES, file_errors

_ROOT = 0
_MOST_LINKS = 40
"""Of a path; the kernel follows as many."""


def is_own(uid: int) -> bool:
    """Whether a user is us, or root, who can do everything anyhow."""
    return uid in (os.geteuid(), _ROOT)


def distrust(found: os.stat_result, *, owners: Collection[int] = (), secret: bool = False) -> str | None:
    """Return why somebody else may have written a file; None: nobody else can.

    Args:
        found: of `os.lstat`, or of `os.fstat` of what was opened without following links.
        owners: uids beside ours and root's whose files count, such as the owner of the run directory.
        secret: whether nobody else may read it either.
    """
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if reason := _foreign(found, owners):
        return reason
    mode = stat.S_IMODE(found.st_mode)
    if secret and mode & 0o077:
        return f"has mode {mode:04o}, which lets others read it; set its mode with chmod 600"
    if mode & stat.S_IWOTH:
        return f"has mode {mode:04o}, which lets everyone write to it; change that with chmod o-w"
    return None


def check_own(
    path: Path,
    handle: int,
    error: type[LockstepError],
    *,
    owners: Collection[int] = (),
    secret: bool = False,
) -> None:
    """Raise unless nobody else can have written an open file (see `distrust`).

    Raises:
        LockstepError: of type `error`, with code `not-ours`, or `not-a-file`.
    """
    found = os.fstat(handle)
    if reason := distrust(found, owners=owners, secret=secret):
        code = "not-ours" if stat.S_ISREG(found.st_mode) else "not-a-file"
        raise error(f"{path} {reason}", code=code)


@contextlib.contextmanager
def open_own(
    path: Path, error: type[LockstepError], *, owners: Collection[int] = (), secret: bool = False
) -> Iterator[BufferedReader]:
    """Open a file for reading in bytes if nobody else can have written it (see `distrust`).

    Raises:
        LockstepError: of type `error`: the file is missing, cannot be read, or somebody else may have written
            it (code `not-ours`, or `not-a-file`).
    """
    with file_errors(path, error):
        # O_NONBLOCK: opening a fifo that nobody writes would wait for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            handle = os.open(path, flags)
        except OSError:
            if path.is_symlink():
                raise error(
                    f"not-ours: {path} is a link, which is not followed; replace it with the file"
                ) from None
            raise
    with os.fdopen(handle, "rb") as file:
        check_own(path, handle, error, owners=owners, secret=secret)
        with file_errors(path, error):
            yield file


def read_own(
    path: Path,
    error: type[LockstepError],
    *,
    owners: Collection[int] = (),
    secret: bool = False,
    limit: int = JSON_BYTES,
) -> bytes:
    """Read all bytes of a file of at most `limit` bytes that nobody else can have written.

    Raises:
        LockstepError: of type `error`, as of `open_own`; the file is larger.
    """
    with open_own(path, error, owners=owners, secret=secret) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise error(f"too-large: {path} is larger than {limit:,} bytes")
    return data


def check_own_folder(folder: Path, *, advice: str) -> None:
    """Check that nobody else can put anything into a folder, or another folder in its place.

    Args:
        advice: what to do about it; ends the message.

    Raises:
        ConfigError: names the part of the path that somebody else may change (code `not-ours`), or the system
            does not let us look.
    """
    with file_errors(folder, ConfigError, advice=advice):
        for part in _parts(folder):
            found = os.lstat(part)
            reason = _foreign(found, ())
            if reason is None and not stat.S_ISLNK(found.st_mode):
                reason = _open_to_others(found, last=part == folder.absolute())
            if reason is not None:
                raise ConfigError(
                    f"not-ours: {f'{folder}: ' if part != folder else ''}{part} {reason}; {advice}"
                )


def _parts(path: Path) -> Iterator[Path]:
    """Every folder and link that the system passes on the way to `path`, from the root on, and `path`."""
    todo, at, links = list(reversed(path.absolute().parts[1:])), Path(path.absolute().anchor), 0
    yield at
    while todo:
        name = todo.pop()
        if name == "..":
            at = at.parent
            continue
        next_ = at / name
        yield next_
        if not next_.is_symlink():
            at = next_
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError("too many links")
        target = next_.readlink()
        at = Path(target.anchor) if target.is_absolute() else at
        todo += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _foreign(found: os.stat_result, owners: Collection[int]) -> str | None:
    if is_own(found.st_uid) or found.st_uid in owners:
        return None
    return f"belongs to {_user(found.st_uid)}, not to {_user(os.geteuid())}"


def _open_to_others(found: os.stat_result, *, last: bool) -> str | None:
    """Why others may rename what is in a folder, and, in the last, make something; None: they may not."""
    mode = stat.S_IMODE(found.st_mode)
    if mode & stat.S_ISVTX and not last:
        return None
    if mode & stat.S_IWOTH:
        return f"has mode {mode:04o}, which lets everyone write there"
    if mode & stat.S_IWGRP and not _private(found.st_gid):
        return f"has mode {mode:04o}, which lets its group ({_group(found.st_gid)}) write there"
    return None


def _private(gid: int) -> bool:
    """Whether a group is root's, or named after our user and without other members, as many systems make
    one for each user (with umask 002)."""
    if gid == _ROOT:
        return True
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


def _group(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)
