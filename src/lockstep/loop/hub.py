"""`checkpoint.push_to_hub`: upload an exported model to a repository of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.run_config import RunConfig
from lockstep.config.train import CheckpointConfig
from lockstep.errors import ConfigError, ModelError, redacted

if TYPE_CHECKING:
    from lockstep.ranks.context import RankContext

PUSH = "checkpoint.push_to_hub"


def check_hub(run: RunConfig) -> None:
    """Check what can be known of an upload before the training: it needs a valid name, the network and a
    token. Nothing is sent.

    Raises:
        ConfigError: one of them is missing.
    """
    repo = run.checkpoint.push_to_hub
    if repo is None:
        return
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(
            f"wrong-format: {PUSH} = {repo!r} is not the name of a repository ({error}); write OWNER/NAME",
            setting=PUSH,
        ) from error
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"wrong-environment: {PUSH} = {repo!r}, but HF_HUB_OFFLINE forbids all requests to the hub; "
            "unset it, or leave the setting out and upload later: hf upload REPO RUN_DIR/export"
        )
    if get_token() is None:
        raise ConfigError(
            f"not-authenticated: {PUSH} = {repo!r} needs a token of the hub with write permission; run "
            "`hf auth login`, or set HF_TOKEN",
            setting=PUSH,
        )


def push_export(
    checkpoint: CheckpointConfig, folder: Path, *, ranks: RankContext, say: Callable[[str], None]
) -> dict[str, str]:
    """Upload an export from rank 0, if the run asks for it, and say where it is; returns the field of the
    summary about it. Collective. Raises as `push`."""
    repo = checkpoint.push_to_hub
    if repo is None:
        return {}
    upload = partial(push, folder, repo, private=checkpoint.hub_private)
    url = ranks.on_rank_zero(upload, str, what="the upload to the hub")
    say(f"uploaded {folder} to {url}")
    return {"uploaded_to": url}


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Upload an exported folder in one commit, and return its address. The repository is created if it does
    not exist.

    Args:
        private: of a repository that is created.

    Raises:
        ModelError: the hub refuses it, or cannot be reached. The folder is as it was.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # Of the HTTP library that the installed huggingface_hub uses: a connection that fails or breaks.
    connection: type[Exception] = HfHubHTTPError.__mro__[1]
    try:
        api = HfApi()
        name = api.create_repo(repo, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload a Lockstep export"
        )
    except (connection, OSError, RuntimeError, ValueError) as error:
        code, why = "unreachable", str(error)
        if isinstance(error, HfHubHTTPError):
            # Its whole text has addresses of the API and of a page about status codes.
            code, why = "refused", f"status {error.response.status_code}: {error.server_message or error}"
        why = " ".join(redacted(why).split())[:500].rstrip(".")
        raise ModelError(
            f"{folder} could not be uploaded to {repo!r} of the hub: {why}. The export is complete; to "
            f"upload it: hf upload {repo} {folder}",
            code=code,
            setting=PUSH,
        ) from error
    return str(commit.commit_url)
