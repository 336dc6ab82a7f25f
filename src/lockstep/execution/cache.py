"""The cache of compiled code, which processes share."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.observe.cache import cache_root

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_cache() -> Path:
    """Return $TORCHINDUCTOR_CACHE_DIR, else inductor/ in the cache of Lockstep."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    own = os.environ.get(_VARIABLE)
    # torch writes its own choice, below the temporary folder, into the variable when it first needs one.
    if own and own != os.path.abspath(default_cache_dir()):
        return Path(own)
    return cache_root() / "inductor"


def use_compile_cache() -> Path:
    """Make inductor keep its kernels and graphs in `compile_cache()`, so that the next start finds them; to
    be called before a compiler is. A second call does nothing.

    The keys are torch's own: graph, shapes, settings, torch's version and hardware. FX graph cache and AOT
    autograd cache are on unless the user turned them off (TORCHINDUCTOR_FX_GRAPH_CACHE,
    TORCHINDUCTOR_AUTOGRAD_CACHE).

    Raises:
        ConfigError: the folder cannot be made.
    """
    folder = compile_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot-write: the compile cache {folder} cannot be made ({error}); set {_VARIABLE} to a folder "
            "that can"
        ) from error
    # The environment is the only thing that inductor reads, and its compile workers inherit it.
    os.environ[_VARIABLE] = str(folder)
    return folder
