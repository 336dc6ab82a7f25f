"""cuBLAS and inductor settings."""

import pytest
import torch

from lockstep import invariant
from lockstep.invariant.selftest import cuda_settings

ATTRIBUTES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture
def libraries(monkeypatch):
    """What the preferred library was set to; the process's settings are as before at the end."""
    matmul = torch.backends.cuda.matmul
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in ATTRIBUTES}
    tf32 = matmul.allow_tf32
    found = ["default"]

    def preferred(name=None):
        if name is not None:
            found.append(name)
        return found[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    yield found
    for name, value in before.items():
        setattr(matmul, name, value)
    matmul.allow_tf32 = tf32


def test_configure_cuda(libraries):
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = True
    for name in ATTRIBUTES:
        setattr(matmul, name, (True, True))
    before = cuda_settings()
    invariant.configure_cuda()
    assert libraries == ["default", "cublaslt"] and not matmul.allow_tf32
    for name in ATTRIBUTES:
        assert (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) == (False, False)
    # Verdicts of a self-test under other settings are not mistaken for those under these.
    assert all(left != right for left, right in zip(before[:4], cuda_settings()[:4], strict=True))


@pytest.mark.parametrize("state", [(True, True), (False, True)])
def test_settings_are_taken_back(libraries, state):
    """Another cell, or a policy that turned out to be outside of the claim, runs under the process's own."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = True
    matmul.allow_bf16_reduced_precision_reduction = state
    before = cuda_settings()
    with pytest.raises(KeyError), invariant.configured(True):
        assert cuda_settings() != before
        raise KeyError
    assert cuda_settings() == before
    with invariant.configured(False):
        assert cuda_settings() == before


def test_verdicts_are_kept_by_what_cublas_reads_from_the_environment(libraries, monkeypatch):
    before = cuda_settings()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    middle = cuda_settings()
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "77")
    assert len({before, middle, cuda_settings()}) == 3


def test_inductor_options_are_known_to_this_torch():
    options = invariant.inductor_options()
    assert options["emulate_precision_casts"] is True and options["max_autotune"] is False
    compiled = torch.compile(lambda x: x + 1, options=options)
    assert compiled(torch.zeros(2)).tolist() == [1.0, 1.0]


def test_options_of_an_older_torch_are_left_out(monkeypatch):
    from torch._inductor import config

    from lockstep.invariant.selftest import _has

    assert _has(config, "cpp.simdlen") and not _has(config, "cpp.nothing") and not _has(config, "no.thing")
    monkeypatch.setattr(
        "lockstep.invariant.selftest._has", lambda config, name: name == "emulate_precision_casts"
    )
    assert invariant.inductor_options() == {"emulate_precision_casts": True}
