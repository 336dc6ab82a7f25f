"""What another user can have written is not believed; the other user here is a uid of its own."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from raising import raises

from lockstep.errors import ConfigError, DataError
from lockstep.observe.trust import check_own_folder, distrust, read_own

UNAUTHORIZED = 54321
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def _by(path: Path, *, mode: int, uid: int = -1) -> Path:
    path.write_text("text")
    path.chmod(mode)
    os.chown(path, uid, -1)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o400])
def test_a_file_that_only_we_may_write_is_read(tmp_path: Path, mode: int) -> None:
    assert read_own(_by(tmp_path / "a", mode=mode), DataError) == b"text"


@pytest.mark.parametrize(("mode", "secret"), [(0o666, False), (0o602, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int, secret: bool) -> None:
    with raises(DataError, "not-ours"):
        read_own(_by(tmp_path / "a", mode=mode), DataError, secret=secret)


@AS_ROOT
def test_a_file_of_a_stranger_is_refused(tmp_path: Path) -> None:
    path = _by(tmp_path / "a", mode=0o600, uid=UNAUTHORIZED)
    with raises(DataError, "not-ours"):
        read_own(path, DataError)
    assert read_own(path, DataError, owners=[UNAUTHORIZED]) == b"text"


def test_who_the_owner_is_decides(tmp_path: Path) -> None:
    found = os.stat(_by(tmp_path / "a", mode=0o600))
    of_stranger = os.stat_result([*found[:4], UNAUTHORIZED, *found[5:10]])
    assert distrust(found) is None
    assert "54321" in str(distrust(of_stranger))
    assert distrust(of_stranger, owners=[UNAUTHORIZED]) is None


def test_a_link_and_what_is_no_file_are_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(_by(tmp_path / "a", mode=0o600))
    os.mkfifo(tmp_path / "pipe")
    for name, code in (("link", "not-ours"), ("pipe", "not-a-file")):
        with raises(DataError, code):
            read_own(tmp_path / name, DataError)
    with raises(DataError, "cannot-read"):
        read_own(tmp_path / "nothing", DataError)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with raises(DataError, "too-large"):
        read_own(_by(tmp_path / "a", mode=0o600), DataError, limit=3)


def _world(above: Path) -> None:
    above.chmod(0o777)


def _sticky(above: Path) -> None:
    above.chmod(0o777 | stat.S_ISVTX)


def _group(above: Path) -> None:
    os.chown(above, -1, UNAUTHORIZED if os.geteuid() == 0 else os.getgroups()[-1])
    above.chmod(0o770)


def _stranger(above: Path) -> None:
    os.chown(above, UNAUTHORIZED, -1)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        pytest.param(_world, True, id="everybody may rename what is in it"),
        pytest.param(_sticky, False, id="sticky, as /tmp is"),
        pytest.param(_group, True, id="a group may", marks=AS_ROOT),
        pytest.param(_stranger, True, id="a stranger's", marks=AS_ROOT),
    ],
)
def test_every_folder_of_the_path_counts(
    tmp_path: Path, change: Callable[[Path], None], refused: bool
) -> None:
    folder = tmp_path / "above" / "between" / "own"
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "link").symlink_to("above/between")
    through = tmp_path / "link" / "own"
    check_own_folder(folder, advice="")
    check_own_folder(through, advice="")
    change(tmp_path / "above")
    for path in (folder, through):
        if refused:
            with raises(ConfigError, "not-ours"):
                check_own_folder(path, advice="")
        else:
            check_own_folder(path, advice="")


def test_the_folder_itself_is_ours_alone(tmp_path: Path) -> None:
    """Sticky is not enough for it: others could make files there."""
    for mode in (0o777, 0o777 | stat.S_ISVTX):
        tmp_path.chmod(mode)
        with raises(ConfigError, "not-ours"):
            check_own_folder(tmp_path, advice="")
    (tmp_path / "loop").symlink_to("loop")
    with raises(ConfigError, "cannot-read"):
        check_own_folder(tmp_path / "loop", advice="")
