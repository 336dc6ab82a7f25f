"""Do the tests of SkyRL that speak through the `tinker` client alone pass against `lockstep serve`?

    python benchmarks/skyrl_tests.py --repository GITDIR --work DIR --out FILE.json [--only TEST ...]

GITDIR is a clone of github.com/NovaSky-AI/SkyRL or its .git folder; its test files are unpacked into DIR as
they are. Needs `pip install --no-deps -r benchmarks/tinker_constraints.txt` beside lockstep-rl[serve]. Only
the start of the server is changed:

- `uv run ... -m skyrl.tinker.api --port ...`, with which tests start one, runs `lockstep serve` instead, with
  the bundled model under the name that they give.
- The key is one that our server takes, also for the question whether it is up.
- Adapters that are made without a seed get seed 0: those of SkyRL's Megatron backend all begin alike, ours do
  not.
- "needs CUDA", which is true of SkyRL's server, is no reason to skip here.

FILE has the commit, the outcome of each test, the error of those that fail with the reason, and what is left
out with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinker_recipes import tiny_model

from lockstep.models.source import bundled_folder

MODEL = "bundled:smollm2-135m"
NAME = "trl-internal-testing/tiny-Qwen3ForCausalLM"
"""The base model of SkyRL's tests; its tokenizer is looked up in a folder of this name."""
KEY = "tml-" + "0123456789abcdef" * 2
SECONDS = 3600
TINY = ("skyrl_train/test_async_sample_routing.py",)
"""Its deadline for 24 steps is short for a CPU: it gets two layers with random weights."""
HERE = Path(__file__).resolve()
TESTS: tuple[str, ...] = (
    "test_api.py",
    "skyrl_train/test_fsdp_tinker.py",
    "skyrl_train/test_multi_lora_megatron.py",
    "skyrl_train/test_async_sample_routing.py",
)
_NOT_IN_CLIENT = "{} is not in client 0.38; SkyRL's tests are for 0.24 and older"
OF_SKYRL: Mapping[str, str] = {
    "test_api.py::test_training_workflow": "expects loss_fn_output_type 'scalar'; the client's is another",
    "test_api.py::test_sample_prompt_logprobs": "expects topk_prompt_logprobs to be refused; ours are served",
    "test_api.py::test_unload_model": _NOT_IN_CLIENT.format("models.unload"),
    "skyrl_train/test_fsdp_tinker.py::test_second_adapter_rejected": "expects a second adapter to be "
    "refused; ours is served",
    "skyrl_train/test_multi_lora_megatron.py::test_rank_mismatch_rejected": "expects a second rank to be "
    "refused; ours is served",
    "skyrl_train/test_multi_lora_megatron.py::test_sample_prompt_logprobs": "expects prompt_logprobs with "
    "topk_prompt_logprobs alone; by the client's page they are None unless asked for",
    "skyrl_train/test_multi_lora_megatron.py::test_delete_then_train_remaining": _NOT_IN_CLIENT.format(
        "models.unload"
    ),
}
"""Why a test fails where that is no defect of ours."""
_OWN_PARTS = "calls SkyRL's own Python code, no server"
_OWN_DATABASE = "reads the database of SkyRL's server"
_OWN_START = "the command line that starts SkyRL's engine"
LEFT_OUT: Mapping[str, str] = {
    "test_api.py::test_delete_checkpoint": "expects SkyRL's .tar.gz files; and client 0.38 waits for itself "
    "for ever in create_rest_client while create_lora_training_client is under way",
    "test_api.py::test_build_cmd_engine": _OWN_START,
    "test_api.py::test_build_cmd_engine_invalid_arg": _OWN_START,
    "test_api.py::test_stale_session_cleanup": "reads the log of SkyRL's server",
    "skyrl_train/test_async_sample_routing.py::test_engine_state_published": _OWN_DATABASE,
    "skyrl_train/test_async_sample_routing.py::test_sample_uses_external_path": _OWN_DATABASE,
    "test_sample_session_routing.py": _OWN_DATABASE,
    "test_api_validation.py": _OWN_PARTS,
    "test_db.py": _OWN_PARTS,
    "test_engine.py": _OWN_PARTS,
    "test_future_waiting.py": _OWN_PARTS,
    "test_loss_fns.py": _OWN_PARTS,
    "test_proto_serialization.py": _OWN_PARTS,
    "test_training_request_idempotency.py": _OWN_PARTS,
    "skyrl_train/test_loss_normalization.py": _OWN_PARTS,
    "skyrl_train/test_render_server.py": _OWN_PARTS,
    "skyrl_train/test_sample_session_routing.py": _OWN_PARTS,
    "skyrl_train/test_text_only_batch_no_inference.py": _OWN_PARTS,
    "skyrl_train/test_warm_runtime_lifecycle.py": _OWN_PARTS,
}
"""Files and tests below tests/tinker that do not speak through the client alone."""


# in the process of a test: pytest -p skyrl_tests


def pytest_configure() -> None:
    """Take the place of what test files import of SkyRL's server."""
    for name in ("skyrl", "skyrl.tinker", "skyrl.tinker.api", "skyrl.tinker.config"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["skyrl.tinker.api"]._build_uv_run_cmd_engine = None  # type: ignore[attr-defined]
    sys.modules["skyrl.tinker.config"].EngineConfig = dict  # type: ignore[attr-defined]
    import tinker

    made = tinker.ServiceClient.create_lora_training_client

    def seeded(self: Any, *args: Any, seed: int | None = 0, **kwargs: Any) -> Any:
        return made(self, *args, seed=seed, **kwargs)

    tinker.ServiceClient.create_lora_training_client = seeded


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Give the tests our key, and let none be skipped for want of a GPU."""
    import pytest

    for item in items:
        module = item.getparent(pytest.Module)
        for node in (item, module):
            node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]
        module.obj.TINKER_API_KEY = KEY
        for name in ("api_server_is_up", "_server_is_up"):
            if hasattr(module.obj, name):
                setattr(module.obj, name, is_up)


def is_up(port: int) -> bool:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/v1/healthz", headers={"X-API-Key": KEY})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return bool(answer.read())
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


# in the place of `uv run`


def serve(arguments: list[str]) -> None:
    """Become the server that the arguments of SkyRL's ask for."""
    rest = arguments[arguments.index("skyrl.tinker.api") + 1 :]
    given = dict(zip(rest[::2], rest[1::2], strict=True))
    folder = Path(tempfile.mkdtemp(prefix="served-", dir=os.environ["SKYRL_WORK"]))
    tokens = folder / "tokens-given.json"
    tokens.touch(mode=0o600)
    tokens.write_text(json.dumps({"user": KEY}))
    command = [sys.executable, "-m", "lockstep", "serve", "--model", _model(given["--base-model"])]
    command += ["--dir", given.get("--checkpoints-base", str(folder / "run")), "--host", given["--host"]]
    os.execv(sys.executable, [*command, "--port", given["--port"], "--tokens", str(tokens)])


def _model(name: str) -> str:
    return f"{name}={os.environ['SKYRL_MODEL']}"


# the script


def unpack(repository: Path, work: Path) -> str:
    """Write the test files and the folder of the tokenizer into `work`. Returns the commit."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", f"--git-dir={repository}", *arguments], check=True, capture_output=True, text=True
        ).stdout

    for name in git("ls-tree", "-r", "--name-only", "HEAD", "tests/tinker").splitlines():
        if name.endswith(".py"):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(git("show", f"HEAD:{name}"))
    (work / "tests/__init__.py").touch()
    (work / NAME).mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(bundled_folder(MODEL.partition(":")[2]) / name, work / NAME)
    uv = work / "bin/uv"
    uv.parent.mkdir(exist_ok=True)
    uv.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE}" serve "$@"\n')
    uv.chmod(0o755)
    return git("rev-parse", "HEAD").strip()


def run_pytest(work: Path, model: str, *arguments: str) -> str:
    """Run pytest in `work` and return its output."""
    python_path = [str(HERE.parent), str(HERE.parent.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PATH": f"{work / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(part for part in python_path if part),
        "SKYRL_WORK": str(work),
        "SKYRL_MODEL": model,
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "skyrl_tests", "-p", "no:cacheprovider", "-q"]
    command += [f"--rootdir={work}", f"--confcutdir={work}", "-W", "ignore", *arguments]
    return subprocess.run(
        command, cwd=work, env=environment, text=True, check=False, timeout=SECONDS, capture_output=True
    ).stdout


def run(name: str, work: Path, chosen: str) -> dict[str, dict[str, Any]]:
    """Run the tests of a file. Returns for each its outcome, seconds and, if it failed, the error."""
    report = work / f"{Path(name).stem}.xml"
    model = tiny_model(work / "tiny") if name in TINY else MODEL
    arguments = ["--tb=short", f"--junitxml={report}", "-k", chosen, f"tests/tinker/{name}"]
    arguments += [f"--deselect=tests/tinker/{left}" for left in LEFT_OUT if left.startswith(f"{name}::")]
    report.with_suffix(".txt").write_text(run_pytest(work, model, *arguments))
    found: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{name}::{case.get('name')}"
        seconds = round(float(case.get("time", 0)), 1)
        found[test] = {"outcome": "passed", "seconds": seconds}
        failure = next(
            (case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None
        )
        if failure is not None:
            found[test] = {"outcome": "failed", "seconds": seconds, "error": failure.get("message", "")[:300]}
            if test in OF_SKYRL:
                found[test]["reason"] = OF_SKYRL[test]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=TESTS, default=TESTS, help="files")
    parser.add_argument("-k", default="", help="tests, as pytest takes them")
    arguments = parser.parse_args()
    repository = arguments.repository.resolve()
    repository = repository / ".git" if (repository / ".git").exists() else repository
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    commit = unpack(repository, work)
    results: dict[str, Any] = {}
    for name in arguments.only:
        results |= run(name, work, arguments.k)
        for folder in work.glob("served-*"):
            shutil.rmtree(folder)
        outcomes = [one["outcome"] for one in results.values()]
        found = {
            "repository": "https://github.com/NovaSky-AI/SkyRL",
            "commit": commit,
            "model": MODEL,
            "tiny_model": list(TINY),
            "passed": outcomes.count("passed"),
            "failed": outcomes.count("failed"),
            "tests": results,
            "left_out": dict(LEFT_OUT),
        }
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {found['passed']} passed, {found['failed']} failed so far", flush=True)
    return int(any(one["outcome"] == "failed" and "reason" not in one for one in results.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2:])
    sys.exit(main())
