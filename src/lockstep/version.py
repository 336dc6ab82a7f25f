"""The version of Lockstep. Here, so that nothing has to import the package's root for it."""

from __future__ import annotations

import platform
from importlib import metadata

__version__ = "0.1.0"


def version_line() -> str:
    """Return what `lockstep --version` prints, from the metadata of the packages: importing torch takes
    seconds."""
    found = []
    for package in ("torch", "transformers"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return f"lockstep {__version__} ({', '.join(found)}, Python {platform.python_version()})"


# The versions that the numbers of a run depend on.


def library_versions() -> dict[str, str]:
    """Return the versions of Lockstep, Python, torch, transformers and numpy, for manifests and headers."""
    import numpy
    import torch
    import transformers

    return {
        "lockstep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
    }
