"""Crashes, and refusals without a fault: inputs of users, what should happen, and who says so.

Each case is a row: input, expected value, and the source of the expected value.
"""

from __future__ import annotations

import contextlib
import io
import tarfile

import pytest
from raising import raises

from lockstep.errors import RecordingError
from lockstep.recording import corpus

# 14. LoRA targets

# end of 14


# 15. Token ids beyond the embedding

# end of 15


# 16. Full disks, own functions and huge rewards

# end of 16


# 17. Batch sizes of KTO

# end of 17


# 18. Small sets, and all faults at once

# end of 18


# 19. Own rows without rewards

# end of 19


# 20. Templates that end a conversation with eos

# end of 20


# 21. Failed starts leave no run directory

# end of 21


# 22. Names that nearly match

# end of 22


# 23. Exit codes

# end of 23


# 24. Values, lines and lengths in messages

# end of 24


# 25. Submit, the environment of ranks, and cluster.md

# end of 25


# 36. The lowest supported Python


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        # Python 3.11.2 has no TarFile.extractall(filter=). Source: PEP 706, on `filter="data"`.
        (("corpus/a.json", tarfile.REGTYPE, ""), {"corpus/a.json"}),
        (("corpus", tarfile.DIRTYPE, ""), set()),
        (("../a.json", tarfile.REGTYPE, ""), None),
        (("/tmp/a.json", tarfile.REGTYPE, ""), None),
        (("corpus/a.json", tarfile.SYMTYPE, "/etc/passwd"), None),
        (("corpus/a.json", tarfile.LNKTYPE, "/etc/passwd"), None),
        (("corpus/a.json", tarfile.FIFOTYPE, ""), None),
    ],
)
def test_the_shipped_archive_is_unpacked_by_every_python(member, expected, tmp_path):
    """The files that are written, or None: refused."""
    packed = io.BytesIO()
    name, kind, target = member
    with tarfile.open(fileobj=packed, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        archive.addfile(info)
    packed.seek(0)
    refused = raises(RecordingError, f"damaged-file: {corpus.ARCHIVE.name}")
    with tarfile.open(fileobj=packed) as archive, refused if expected is None else contextlib.nullcontext():
        corpus._extract(archive, tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()} == (
        expected or set()
    )


# end of 36


# 37. File descriptors under attack

# end of 37


# 38. Matrix on inputs without a signal

# end of 38
