"""Which environment variables a rank on another node gets, and from where.

    travels   what decides how ranks compute, find each other and log, by name: from the driver to every rank
    stays     what programs need of their own machine (PATH, HOME, libraries, cache folders, proxies,
              certificates): from the node
    secrets   cluster.secrets: names travel, values are the node's own

Everything else stays where it is. So no token, no password in a URL, and nothing of this shell reaches a job
record, a log or another machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lockstep.errors import ConfigError

_SECRET = re.compile(r"TOKEN(?!IZERS_)|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.I)
_SWITCHES = {"HF_HUB_DISABLE_IMPLICIT_TOKEN"}
"""Names that look like those of secrets, and say on or off."""
_USERINFO = re.compile(r"://[^/?#]*@")
"""A name, and perhaps a password, in a URL."""
_FOLDERS = r"(?:TORCH|TORCHINDUCTOR|TRITON|WANDB|HF)_\w*(?:HOME|DIR)|HF_\w*CACHE"
"""Each node has them where it likes."""
_TRAVELS = re.compile(
    rf"(?!(?:{_FOLDERS})$)"
    r"(?:LOCKSTEP_(?!RANKS_SECRET|LAUNCHER_PID|CACHE)\w+"
    r"|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM"
    r"|ATEN_CPU_CAPABILITY|(?:ONEDNN|DNNL)_MAX_CPU_ISA|MKL_(?:ENABLE_INSTRUCTIONS|CBWR)"
    r"|(?:OMP|MKL)_NUM_THREADS|CUBLAS_WORKSPACE_CONFIG|PYTHONHASHSEED|PYTORCH_\w*ALLOC_CONF"
    r"|(?:NCCL|GLOO|TORCH|TORCHINDUCTOR|TRITON|WANDB|HF)_\w+)"
)
_STAYS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TERM|TMPDIR|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX"
    r"|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|CUDA_HOME|CUDA_PATH|CUDA_VISIBLE_DEVICES|NVIDIA_\w+"
    r"|XDG_(?:CACHE|CONFIG|DATA)_HOME|LOCKSTEP_CACHE|(?:HUGGINGFACE_HUB|TRANSFORMERS)_CACHE"
    rf"|{_FOLDERS}"
    r"|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|(?:HTTPS?|ALL|NO)_PROXY|(?:https?|all|no)_proxy"
)


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of the driver's environment every rank gets."""
    return {
        name: value
        for name, value in environ.items()
        if _TRAVELS.fullmatch(name) and not _is_secret(name) and not _USERINFO.search(value)
    }


def staying(environ: Mapping[str, str], *, secrets: Sequence[str] = ()) -> dict[str, str]:
    """Return what of a node's own environment its ranks get.

    Raises:
        ConfigError: it has no value for a name of `secrets`.
    """
    if missing := [name for name in secrets if not environ.get(name)]:
        raise ConfigError(
            f"wrong-environment: cluster.secrets names {', '.join(missing)}, not set in the environment of "
            "this node; set it where the node's part of the cluster is started, or leave it out",
            setting="cluster.secrets",
        )
    kept = {n: v for n, v in environ.items() if _STAYS.fullmatch(n) and not _is_secret(n)}
    return kept | {name: environ[name] for name in secrets}


def _is_secret(name: str) -> bool:
    return name not in _SWITCHES and _SECRET.search(name) is not None
