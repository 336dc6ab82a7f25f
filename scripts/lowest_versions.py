"""Print the lowest version that pyproject.toml admits of each dependency, as requirements for pip.

`make test-lowest` installs them. Extras are named on the command line: lowest_versions.py bundled lora
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

LOWER_BOUND = re.compile(r"([A-Za-z0-9._-]+(?:\[[a-z,]+\])?)>=([0-9][0-9A-Za-z.]*)")


def lowest(text: str, extras: list[str]) -> list[str]:
    """Return the dependencies of a pyproject.toml, and of its extras, each pinned to its lower bound.

    Raises:
        ValueError: a requirement has no lower bound, or more than that.
    """
    project = tomllib.loads(text)["project"]
    pins = []
    for requirement in [
        *project["dependencies"],
        *(entry for extra in extras for entry in project["optional-dependencies"][extra]),
    ]:
        found = LOWER_BOUND.fullmatch(requirement)
        if found is None:
            raise ValueError(
                f"{requirement!r} is not NAME>=VERSION; give it a lower bound that a test can install"
            )
        pins.append(f"{found[1]}=={found[2]}")
    return pins


if __name__ == "__main__":
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    print("\n".join(lowest(pyproject.read_text(encoding="utf-8"), sys.argv[1:])))
