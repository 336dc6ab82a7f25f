"""checkpoint.push_to_hub, against a stand-in of the hub's HTTP API and the real huggingface_hub."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub, hub
from raising import raises

from lockstep.config.load import load_run
from lockstep.errors import ConfigError


@pytest.fixture
def server() -> Iterator[Hub]:
    with hub() as running:
        yield running


def lockstep(
    *words: str, server: Hub, cwd: Path, token: str | None = TOKEN, **env: str
) -> subprocess.CompletedProcess[str]:
    """A command that takes the stand-in for the hub: huggingface_hub reads where it is at its import."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cwd / "home"), **env}
    environment |= {} if token is None else {"HF_TOKEN": token}
    command = [sys.executable, "-m", "lockstep", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


TINY = (
    "train",
    "--recipe",
    "tiny",
    "--steps",
    "1",
    "--eval.no-before",
    "--eval.no-after",
    "--run-dir",
    "run",
)


def test_an_export_is_uploaded_whole(server: Hub, tmp_path: Path) -> None:
    ended = lockstep(*TINY, "--push-to-hub", "somebody/tiny", server=server, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    address = f"{server.url}/somebody/tiny/commit/c0ffee"
    assert f"uploaded run/export to {address}" in ended.stdout
    export = tmp_path / "run" / "export"
    assert server.files == {f"somebody/tiny/{path.name}": path.read_bytes() for path in export.iterdir()}
    assert "somebody/tiny/model.safetensors" in server.files
    (created,) = server.created
    assert "private" in (created.get("visibility"), "private" if created.get("private") else None)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["uploaded_to"] == address
    assert TOKEN not in ended.stdout + ended.stderr


def test_a_refused_upload_fails_the_run_and_is_made_up_for_by_a_resume(server: Hub, tmp_path: Path) -> None:
    server.refuses = 403
    ended = lockstep(*TINY, "--push-to-hub", "somebody/tiny", server=server, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "lockstep train: error[refused]: run/export could not be uploaded to 'somebody/tiny' of the hub: "
        "status 403: You have no write access to this repository. The export is complete; to upload it: "
        "hf upload somebody/tiny run/export, or `lockstep train --resume run`"
    )
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file() and not server.files
    server.refuses = 0
    ended = lockstep("train", "--resume", "run", server=server, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "somebody/tiny/model.safetensors" in server.files


def test_what_would_fail_at_the_end_is_refused_at_the_start(server: Hub, tmp_path: Path) -> None:
    for flags, token, env, told in (
        (["--push-to-hub", "a/b/c"], TOKEN, {}, "error[wrong-format]"),
        (["--push-to-hub", "a/b"], None, {}, "error[not-authenticated]"),
        (["--push-to-hub", "a/b"], TOKEN, {"HF_HUB_OFFLINE": "1"}, "error[wrong-environment]"),
    ):
        ended = lockstep(*TINY, *flags, server=server, cwd=tmp_path, token=token, **env)
        assert ended.returncode == 2 and told in ended.stderr, ended.stderr
    assert not (tmp_path / "run").exists() and not server.created
    with raises(ConfigError, "contradiction: export_at_end", setting="checkpoint.push_to_hub"):
        load_run("tiny", overrides={"checkpoint.push_to_hub": "a/b", "checkpoint.export_at_end": False})
