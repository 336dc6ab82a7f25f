"""The SGLang of an interpreter, and its command line options, without importing it.

`launch_server --help` imports torch and most of SGLang, which takes longer than many a run's first step. The
options are fields of dataclasses, and reading those from the source takes milliseconds.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.errors import ConfigError

OLDEST = (0, 5, 16)
"""Written and tested against this version and the newest; older ones lack fields that are sent."""
_SECONDS = 60.0
_FLAG = re.compile(r"--[a-z0-9][a-z0-9-]*")
_OPTION_FILES = ("srt/server_args.py", "srt/arg_groups/fields/*.py")
_LOOK = (
    "import importlib.util, json; "
    "spec = importlib.util.find_spec('sglang'); "
    "print(json.dumps(list(spec.submodule_search_locations or []) if spec else []))"
)


@dataclass(frozen=True)
class SGLangPackage:
    """The package's folder, as some interpreter would import it."""

    folder: Path

    @cached_property
    def version(self) -> str:
        """Raises ConfigError when the package does not say."""
        for name in ("_version.py", "version.py"):
            file = self.folder / name
            if file.is_file() and (match := re.search(r"= *['\"](\d+\.\d+[^'\"]*)['\"]", file.read_text())):
                return match[1]
        raise ConfigError(
            f"unsupported-version: {self.folder} does not say which version of SGLang it is; install a "
            "released one",
            name="version",
        )

    @cached_property
    def flags(self) -> frozenset[str]:
        """Every "--option" of `launch_server`. Raises ConfigError when none is found."""
        files = [file for pattern in _OPTION_FILES for file in sorted(self.folder.glob(pattern))]
        flags = frozenset(flag for file in files for flag in _flags_in(ast.parse(file.read_text())))
        if "--model-path" not in flags:
            raise ConfigError(
                f"unsupported-version: no command line options were found in {self.folder} (SGLang "
                f"{self.version}); use a version from 0.5.16 to 0.5.23",
                name=self.version,
            )
        return flags


def find_package(python: Path | str, environment: Mapping[str, str]) -> SGLangPackage:
    """Find the SGLang that `python` would import with this environment.

    Raises:
        ConfigError: it has none, or one that is too old.
    """
    try:
        done = subprocess.run(
            [str(python), "-c", _LOOK],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise ConfigError(f"process-died: engine.python = {python} cannot be run: {reason}") from error
    folders = json.loads(done.stdout)
    if not folders:
        raise ConfigError(
            f"missing-package: {python} has no sglang; install it into an environment of its own and set "
            "engine.python to the interpreter of that (docs/how-to/sglang.md)",
            setting="engine.python",
        )
    package = SGLangPackage(Path(folders[0]))
    check_version(package.version)
    return package


def check_version(version: str) -> None:
    """Raises ConfigError for a version that is too old."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST:
        raise ConfigError(
            f"unsupported-version: SGLang {version} is older than {'.'.join(map(str, OLDEST))}, the oldest "
            "that Lockstep speaks to; use a newer one",
            name=version,
        )


def _flags_in(tree: ast.Module) -> Iterator[str]:
    """A field's name makes its flag, unless its annotation names another one or none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
            yield node.value
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                words = {k.arg for k in ast.walk(field.annotation) if isinstance(k, ast.keyword)}
                if not words & {"no_cli", "cli_name"}:
                    yield f"--{field.target.id.replace('_', '-')}"
