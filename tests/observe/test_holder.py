"""The process that a file names by its pid."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lockstep.observe.lock import holding, holds, process_start


@pytest.mark.parametrize(
    ("is_open", "another_user", "expected"),
    [
        # by hand: who holds the file is known, whoever runs it; only ours or the owner's is signalled
        (True, False, True),
        (False, False, False),
        (True, True, None),
        (False, True, False),
    ],
)
def test_a_process_of_a_third_user_that_holds_the_file_is_there_and_not_signalled(
    is_open: bool, another_user: bool, expected: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a run that one user began is gone on with by another, and a third looks."""
    path, pid = tmp_path / "lock", os.getpid()
    path.write_text("")
    user = os.geteuid() + (1000 if another_user else 0)
    monkeypatch.setattr(psutil.Process, "uids", lambda self: SimpleNamespace(effective=user))
    with path.open() as file:
        if not is_open:
            file.close()
        assert holds(path, pid=pid, started=process_start(pid)) is expected
        with holding(path, pid=pid, started=process_start(pid)) as holder:
            assert (holder is not None) is bool(expected)
