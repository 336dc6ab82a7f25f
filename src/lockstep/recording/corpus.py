"""Where the recording lies that comes with Lockstep."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
from pathlib import Path

from lockstep.errors import RecordingError
from lockstep.observe.files import cache_root

ARCHIVE = Path(__file__).with_name("corpus.tar.xz")
"""One folder, corpus/, packed as `benchmarks/record_corpus.py` says: half the size of its files."""


def corpus_path() -> Path:
    """The shipped corpus: inputs of a GRPO run of the bundled model on two data-parallel ranks.

    It is unpacked into the cache at its first use; a reader checks its hashes like those of any recording.
    Safe to call from several processes at once.

    Raises:
        RecordingError: this installation comes without it, or the cache cannot be written.
    """
    try:
        digest = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()
    except OSError as error:
        raise RecordingError(
            f"cannot-read: {ARCHIVE}: this installation comes without the shipped corpus ({error.strerror}); "
            "install lockstep-rl from a wheel or a whole checkout, or name a recording"
        ) from error
    # The hash in the name: another version of the package never reads this one's files.
    folder = cache_root() / f"corpus-{digest[:16]}"
    if not folder.is_dir():
        try:
            _unpack(folder)
        except OSError as error:
            raise RecordingError(
                f"cannot-write: the shipped corpus cannot be unpacked into {folder} ({error}); set "
                "LOCKSTEP_CACHE to a folder you can write"
            ) from error
    return folder


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Write the regular files of `archive` below `folder`: TarFile.extractall has no `filter` before Python
    3.11.4, and without one it follows any name.

    Raises:
        RecordingError: the archive holds something else, or a name that leads out of `folder`.
    """
    for member in archive:
        path = folder / member.name
        if member.isdir():
            continue
        if not member.isfile() or not path.resolve().is_relative_to(folder.resolve()):
            raise RecordingError(
                f"damaged-file: {ARCHIVE}: {member.name!r} is not a file below the archive's folder; "
                "install lockstep-rl again",
                path=ARCHIVE,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        data = archive.extractfile(member)
        assert data is not None  # isfile() says so
        with data, path.open("wb") as file:
            shutil.copyfileobj(data, file)


def _unpack(folder: Path) -> None:
    """Make `folder`: readers see all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".corpus-", dir=folder.parent) as temporary,
        tarfile.open(ARCHIVE) as archive,
    ):
        _extract(archive, Path(temporary))
        try:
            (Path(temporary) / "corpus").rename(folder)
        except OSError:  # another process was faster; its files are the same
            if not folder.is_dir():
                raise
