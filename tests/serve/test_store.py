"""What a server leaves in its run directory."""

from __future__ import annotations

import errno
import json
import stat
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.errors import CheckpointError, ConfigError, DataError
from lockstep.serve.store import About, Store, read_tokens

MODEL = f"s-{'0' * 32}:train:0"


def about(owner: str = "ada", **fields: Any) -> About:
    return About(owner=owner, base_model="tiny", adapters=None, time=1.0, **fields)


def filled(folder: Path) -> None:
    (folder / "file").write_text("x")


def test_tokens_are_private_and_stay(tmp_path: Path) -> None:
    first = Store(tmp_path / "run").tokens(["ada"])
    assert first["ada"].startswith("tml-") and len(first["ada"]) > 40
    assert stat.S_IMODE((tmp_path / "run" / "tokens.json").stat().st_mode) == 0o600
    both = Store(tmp_path / "run").tokens(["bob", "ada"])
    assert both["ada"] == first["ada"] != both["bob"]
    assert Store(tmp_path / "run").tokens(["bob"]) == {"bob": both["bob"]}


def test_checkpoints_belong_to_their_owner_until_they_expire(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.write(MODEL, "weights", "one", about(), fill=filled).path
    assert path == f"tinker://{MODEL}/weights/one"
    assert Store(tmp_path).find(path, owner="ada").about == about()
    with raises(DataError, "no-such-file: there is no checkpoint", path=path):
        store.find(path, owner="bob")
    with raises(DataError, "already-exists: take another name", name="one"):
        store.write(MODEL, "weights", "one", about(), fill=filled)
    assert store.find(path, owner="ada", written=1.0).path == path
    with raises(DataError, "wrong-state: was overwritten", path=path):
        store.find(path, owner="ada", written=0.5)
    late = store.write(MODEL, "weights", "late", about(expires_at=2.0), fill=filled).path
    with raises(DataError, "no-such-file: there is no checkpoint", path=late):
        store.find(late, owner="ada")
    store.write(MODEL, "weights", "late", about(), fill=filled)  # as if the other did not exist
    assert [one.name for one in store.of_model(MODEL, owner="ada")] == ["one", "late"]
    store.delete(late, owner="ada")
    store.delete(path, owner="ada")
    assert store.of_model(MODEL, owner="ada") == []


def test_a_new_time_to_live_makes_no_other_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved = store.write(MODEL, "sampler_weights", "one", about(), fill=filled)
    store.set_ttl(saved.path, 3600, owner="ada")
    assert store.has(saved)
    store.write(MODEL, "sampler_weights", "one", about(seq=1), fill=filled, overwrite=True)
    assert not store.has(saved)


def test_a_checkpoint_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fails(folder: Path) -> None:
        filled(folder)
        raise OSError("disk full")

    path = store.write(MODEL, "weights", "one", about(), fill=filled).path
    with raises(CheckpointError, "cannot-write: disk full"):
        store.write(MODEL, "weights", "one", about("bob"), fill=fails, overwrite=True)
    assert store.find(path, owner="ada").about.owner == "ada"
    assert [entry.name for entry in (tmp_path / "models" / MODEL / "weights").iterdir()] == ["one"]


def test_few_unnamed_weights_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    written = [store.write(MODEL, "sampler_weights", None, about(), fill=filled) for _ in range(10)]
    assert [one.folder.exists() for one in written] == [False] * 2 + [True] * 8


def test_tokens_of_a_file_are_the_owners_alone(tmp_path: Path) -> None:
    path, good = tmp_path / "tokens.json", "tml-" + "a" * 32
    path.touch(0o600)
    for text, words in (
        ("[]", "wrong-format: user -> token"),
        ('{"ada": "tml-short"}', "wrong-format: 32 or more"),
        (json.dumps({"ada": good, "bob": good}), "duplicate: one token"),
    ):
        path.write_text(text)
        with raises(ConfigError, words):
            read_tokens(path)
    path.write_text(json.dumps({"ada": good}))
    assert read_tokens(path) == {"ada": good}
    path.chmod(0o640)
    with raises(ConfigError, "not-ours: lets others read it"):
        read_tokens(path)


def test_rows_after_a_torn_one_are_whole(tmp_path: Path) -> None:
    pytest.importorskip("tinker", reason="its messages are what is kept")
    from lockstep.serve.sessions import Sessions

    sessions = Sessions({}, Store(tmp_path), most_clients=1)
    session = sessions.create("ada", "key")
    with session.journal.open("a") as file:
        file.write('{"client": 0, "req')
    for number in range(2):
        again = Sessions({}, Store(tmp_path), most_clients=1).get(session.id, "ada")
        again.write({"number": number})
    rows = [json.loads(line) for line in session.journal.read_text().splitlines()]
    assert rows == [{"user": "ada"}, {"number": 0}, {"number": 1}]


def test_a_row_that_does_not_fit_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tinker", reason="its messages are what is kept")
    from lockstep.serve.sessions import Sessions

    session = Sessions({}, Store(tmp_path), most_clients=1).create("ada", None)

    def half(file: FileIO, data: bytes) -> None:
        file.write(data[:5])
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr("lockstep.serve.sessions._write_whole", half)
        with pytest.raises(CheckpointError):
            session.write({"number": 0})
    session.write({"number": 1})
    rows = [json.loads(line) for line in session.journal.read_text().splitlines()]
    assert rows == [{"user": "ada"}, {"number": 1}]
