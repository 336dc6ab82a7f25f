"""A document's logprobs and gradients do not depend on its neighbours: every cell of the support table."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from parity_models import (
    ARCHITECTURES,
    BUCKET,
    LENGTHS,
    largest_gap,
    measure,
    packs_of,
    relative_error,
    rms_gap,
    tiny_model,
)

from lockstep.config.support import cells_tested_by

ALONE = [[i] for i in range(len(LENGTHS))]
ARRANGEMENTS = {
    "packed": [[0, 1, 2, 3, 4]],
    "other order": [[3, 0], [4, 2, 1]],
}
OURS = list(cells_tested_by("ci-cpu:tests/parity/test_documents.py"))
# The kernel that docs/how-to/extend.md shows has to pass what ours pass.
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "extend"))
CELLS = OURS + [
    cell | {"attention": "dense:attention"}
    for cell in OURS
    if cell["attention"] == "varlen" and cell["layout"] != "shared"
]


def layouts(cell):
    if cell["layout"] != "padded":
        return [{"layout": cell["layout"]}]
    return [{"layout": "padded", "padding_side": side} for side in ("left", "right")]


def kernels(dtype):
    return sorted({cell["attention"] for cell in CELLS if cell["dtype"] == dtype})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", kernels("float32"))
def test_float32_document_is_the_same_in_every_arrangement(kernel, architecture):
    module = tiny_model(architecture, kernel)
    reference = tiny_model(architecture, "hf:eager")
    whole = measure(reference, packs_of(ALONE))
    begin_alike = measure(reference, packs_of(ALONE, layout="shared"))
    # Were attention (nearly) uniform, a wrong mask would go unseen.
    assert min(x[:-1].std().item() for x in whole[0].values() if len(x) > 4) > 0.1
    for cell in (c for c in CELLS if c["attention"] == kernel and c["dtype"] == "float32"):
        alone, alone_grads = begin_alike if cell["layout"] == "shared" else whole
        for layout in layouts(cell):
            for name, groups in {**ARRANGEMENTS, "alone": ALONE}.items():
                for bucket in (None, BUCKET):
                    packs = packs_of(groups, bucket=bucket, layout=layout["layout"])
                    logprobs, grads = measure(module, packs, **layout)
                    gap, error = largest_gap(alone, logprobs), relative_error(alone_grads, grads)
                    print(f"{kernel} {architecture} {layout} {name} {bucket}: {gap:.1e} nats, {error:.1e}")
                    assert gap <= 2e-6
                    assert error <= 1e-5


@pytest.mark.parametrize("kernel", kernels("bfloat16"))
def test_bfloat16_document_stays_within_its_rounding(kernel):
    """Against the same weights in float32: sharing a batch adds no error to that of bfloat16 itself."""
    exact = tiny_model("qwen3", "hf:eager", dtype=torch.bfloat16).float()
    rounded = tiny_model("qwen3", "hf:eager", dtype=torch.bfloat16)
    module = tiny_model("qwen3", kernel, dtype=torch.bfloat16)
    for cell in (c for c in CELLS if c["attention"] == kernel and c["dtype"] == "bfloat16"):
        truth, truth_grads = measure(exact, packs_of(ALONE, layout=cell["layout"]))
        baseline, baseline_grads = measure(rounded, packs_of(ALONE, layout=cell["layout"]))
        for layout in layouts(cell):
            packs = packs_of(ARRANGEMENTS["packed"], layout=layout["layout"])
            packed, grads = measure(module, packs, **layout)
            assert rms_gap(truth, packed) <= 1.5 * rms_gap(truth, baseline)
            assert relative_error(truth_grads, grads) <= 1.5 * relative_error(truth_grads, baseline_grads)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flex_forward_on_cpu(architecture):
    reference, module = tiny_model(architecture, "hf:eager"), tiny_model(architecture, "flex")
    for layout in ({"layout": "packed"}, {"layout": "shared"}, *layouts({"layout": "padded"})):
        alone, _ = measure(reference, packs_of(ALONE, layout=layout["layout"]), grad=False)
        for bucket in (None, BUCKET):
            packs = packs_of(ARRANGEMENTS["packed"], bucket=bucket, layout=layout["layout"])
            packed, _ = measure(module, packs, grad=False, **layout)
            assert largest_gap(alone, packed) <= 2e-6


def test_a_leak_between_documents_would_be_seen():
    """The same tokens as one document: what the tests above would see if borders were ignored."""
    module = tiny_model("llama", "sdpa")
    alone, _ = measure(module, packs_of(ALONE), grad=False)
    batch = packs_of([[0, 1, 2, 3, 4]])[0]
    leaky = dataclasses.replace(batch, lengths=(30,), sample_ids=(0,), max_seqlen=30)
    merged, _ = measure(module, [leaky], grad=False)
    separate = torch.cat([alone[i] for i in range(5)])
    assert (merged[0] - separate)[: LENGTHS[0] - 1].abs().max() < 2e-6
    assert (merged[0] - separate)[LENGTHS[0] :].abs().max() > 0.1


@pytest.mark.parametrize("layout", ["packed", "padded", "shared"])
@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_uninitialised_memory_is_never_read(kernel, layout):
    """torch fills every torch.empty with NaN here."""
    module = tiny_model("mistral", kernel)
    packs = packs_of([[0, 1, 2, 3, 4]], bucket=BUCKET, layout=layout)
    clean, clean_grads = measure(module, packs, layout=layout)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        dirty, grads = measure(module, packs, layout=layout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert largest_gap(clean, dirty) == 0.0
    assert relative_error(clean_grads, grads) == 0.0


def test_padded_layout_computes_every_row_of_every_layer():
    module = tiny_model("llama", "sdpa")
    rows = []
    for layer in module.model.layers:
        layer.mlp.register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape[:-1].numel()))
    measure(module, packs_of([[0, 1, 2, 3, 4]]), grad=False, layout="padded")
    assert rows == [5 * 12] * 3
    rows.clear()
    measure(module, packs_of([[0, 1, 2, 3, 4]]), grad=False)
    assert rows == [30] * 3


def test_shared_layout_computes_a_common_prefix_once_and_changes_no_bit():
    """Three documents share three slots; varlen attends to gathered keys in the same blocks."""
    module = tiny_model("gemma3", "varlen")
    whole, _ = measure(module, packs_of([[0, 1, 2, 3, 4]], layout="shared"), grad=False)
    rows = []
    for layer in module.model.layers:
        layer.mlp.register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape[:-1].numel()))
    shared, _ = measure(module, packs_of([[0, 1, 2, 3, 4]], layout="shared"), grad=False, layout="shared")
    assert rows == [30 - 2 * 3] * 3
    assert largest_gap(whole, shared) == 0.0
