"""Which environment variables a rank on another node gets, and from where.

    travels   what decides how ranks compute and find each other, by name: from the driver to every rank
    stays     what programs need of their own machine (PATH, HOME, libraries): from the node
    secrets   cluster.secrets: names travel, values are the node's own

Everything else stays where it is. So no token, no password in a proxy's URL, and nothing of this shell
reaches a job record, a log or another machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lockstep.errors import ConfigError

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.I)
_TRAVELS = re.compile(
    r"LOCKSTEP_(?!RANKS_SECRET|LAUNCHER_PID|CACHE)\w+"
    r"|HF_HUB_OFFLINE|HF_DATASETS_OFFLINE|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM"
    r"|ATEN_CPU_CAPABILITY|(?:ONEDNN|DNNL)_MAX_CPU_ISA|MKL_(?:ENABLE_INSTRUCTIONS|CBWR)"
    r"|(?:OMP|MKL)_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG|PYTHONHASHSEED|PYTORCH_\w*ALLOC_CONF"
    r"|(?:NCCL|GLOO|TORCH|TORCHINDUCTOR|TRITON)_\w+"
)
_STAYS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TERM|TMPDIR|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX"
    r"|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|CUDA_HOME|CUDA_PATH|CUDA_VISIBLE_DEVICES|NVIDIA_\w+"
    r"|XDG_(?:CACHE|CONFIG|DATA)_HOME|HF_HOME|LOCKSTEP_CACHE|HF_HUB_CACHE|TORCH_HOME|SSL_CERT_(?:FILE|DIR)"
)


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of the driver's environment every rank gets."""
    return {n: v for n, v in environ.items() if _TRAVELS.fullmatch(n) and not _SECRET.search(n)}


def staying(environ: Mapping[str, str], *, secrets: Sequence[str] = ()) -> dict[str, str]:
    """Return what of a node's own environment its ranks get.

    Raises:
        ConfigError: it has no value for a name of `secrets`.
    """
    if missing := [name for name in secrets if not environ.get(name)]:
        raise ConfigError(
            f"cluster.secrets names {', '.join(missing)}, not set in the environment of this node; set it "
            "where the node's part of the cluster is started, or leave it out",
            code="wrong-environment",
            setting="cluster.secrets",
        )
    kept = {n: v for n, v in environ.items() if _STAYS.fullmatch(n) and not _SECRET.search(n)}
    return kept | {name: environ[name] for name in secrets}
