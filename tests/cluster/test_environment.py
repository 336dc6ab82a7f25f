from raising import raises

from lockstep.cluster.rank_host import staying, travelling
from lockstep.errors import ConfigError

SHELL = {
    "PATH": "/bin",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "2",
    "LOCKSTEP_X": "1",
    "LOCKSTEP_RANKS_SECRET": "no",
    "HF_TOKEN": "no",
    "TORCH_API_KEY": "no",
    "http_proxy": "http://user:no@host",
}


def test_only_listed_variables_travel() -> None:
    assert travelling(SHELL) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "LOCKSTEP_X": "1"}


def test_what_limits_the_units_of_a_cpu_travels_as_it_decides_bits() -> None:
    limits = {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "MKL_CBWR": "COMPATIBLE",
    }
    assert travelling(SHELL | limits) == travelling(SHELL) | limits


def test_secrets_are_the_nodes_own() -> None:
    own = {"PATH": "/bin", "http_proxy": "http://user:no@host"}
    assert staying(SHELL) == own
    assert staying(SHELL, secrets=["HF_TOKEN"]) == own | {"HF_TOKEN": "no"}
    with raises(ConfigError, "wrong-environment: cluster.secrets"):
        staying(SHELL, secrets=["WANDB_API_KEY"])
