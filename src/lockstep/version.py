"""The version of Lockstep. Here, so that nothing has to import the package's root for it."""

from __future__ import annotations

import platform

__version__ = "0.1.0"


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
