"""The proof finds planted differences; records say what is true; one can be added from outside."""

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
import textwrap

import pytest
import torch
from raising import raises
from torch import nn
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from lockstep.errors import ModelError
from lockstep.invariant.forms import GatedMLP, RMSNorm, Rotary
from lockstep.models import admission, delta_net, proof_rows
from lockstep.models.admission import admit, check_proof
from lockstep.models.architectures import ARCHITECTURES, check_architecture
from lockstep.models.miniature import random_miniature, tiny_model
from lockstep.models.proof_modes import MODES, SLOW_MODES
from lockstep.models.proof_rows import corpora, forward_gaps, gradient_gap
from lockstep.models.shape_table import SHAPES
from lockstep.ops import delta_rule

TINY = {name: values for name, values in SHAPES.items() if name.startswith("tiny")}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(admission, "_memory", {})


def config_of(name, **changes):
    return AutoConfig.for_model(**SHAPES[name] | changes)


def test_every_architecture_has_a_shape():
    assert {values["model_type"] for values in TINY.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TINY)
def test_modes_hold_or_are_refused_as_the_record_says(name, mode):
    small = tiny_model(config_of(name))
    if mode == "batch-invariant" and not ARCHITECTURES[small.model_type].batch_invariant:
        with raises(ModelError, "not-batch-invariant: no row-invariant form"):
            MODES[mode](small)
        return
    if mode == "value head" and small.model_type in {"granite", "cohere", "cohere2", "qwen3_5_moe_text"}:
        with raises(ModelError, "unsupported-model: "):
            MODES[mode](small)
        return
    assert max(gap.size for gap in MODES[mode](small)) <= 1e-5


GEMMA = RMSNorm(epsilon="eps", unit_offset=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_form_is_the_code_of_the_class(name):
    """transformers repeats the same code in each family; Llama's and Gemma 3's are compared by their numbers
    (tests/invariant)."""
    package = name.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    known = {
        RMSNorm(): LlamaRMSNorm,
        GatedMLP(): LlamaMLP,
        Rotary(): LlamaRotaryEmbedding,
        GEMMA: Gemma3RMSNorm,
    }
    for label, form in ARCHITECTURES[name].forms.items():
        if form in known and label not in ("Gemma3RotaryEmbedding",):
            assert body(getattr(module, label)) == body(known[form]), label


def body(part):
    """The statements of a class's forward, without its docstring."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(part.forward))).body
    return [ast.dump(statement) for statement in function.body]


# Planted differences: what our side computes is changed, transformers' is not.


def _scale(module):
    module.scaling *= 1.01


def _no_window(module):
    module.sliding_window = None


def _other_base(module):
    module.inv_freq = module.inv_freq * 0.9


def _no_query_norm(module):
    module.q_norm = nn.Identity()


def _swapped_gate(module):
    module.gate_proj, module.up_proj = module.up_proj, module.gate_proj


def _detached_weight(module):
    weight = module.weight
    module.forward = lambda x: nn.functional.linear(x, weight.detach())


def _exact_gelu(module):
    module.act_fn = nn.GELU()


def _dropout(module):
    module.act_fn = nn.Sequential(module.act_fn, nn.Dropout(0.1))


def _no_residual_multiplier(module):
    module.residual_multiplier = 1.0


def _other_cap(module):
    module.attn_logit_softcapping *= 1.1


def _later_sinks(module):
    module.sinks.data += 0.1


def _detached_sinks(module):
    sinks = module.sinks.detach()
    del module.sinks
    module.sinks = sinks


PLANTED = {
    "wrong scale": ("tiny-llama", "Attention", _scale, False),
    "ignored window": ("tiny-gemma3", "Attention", _no_window, False),
    "rope of another base": ("tiny-llama", "RotaryEmbedding", _other_base, False),
    "no query norm": ("tiny-qwen3", "Attention", _no_query_norm, False),
    "swapped gate": ("tiny-llama", "MLP", _swapped_gate, False),
    "dropout in training": ("tiny-llama", "MLP", _dropout, False),
    "another gelu": ("tiny-gemma3", "MLP", _exact_gelu, False),
    "no residual multiplier": ("tiny-granite", "DecoderLayer", _no_residual_multiplier, False),
    "another cap of scores": ("tiny-gemma2", "Attention", _other_cap, False),
    "other sinks": ("tiny-gpt-oss", "Attention", _later_sinks, False),
    "sinks without a gradient": ("tiny-gpt-oss", "Attention", _detached_sinks, True),
    "a weight without a gradient": ("tiny-llama", "down_proj", _detached_weight, True),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found(name, monkeypatch):
    shape, part, plant, only_gradients = PLANTED[name]

    def planted(small, *, attention, head="logits"):
        module = random_miniature(small, attention=attention, head=head)
        if attention != "eager":
            for path, each in module.named_modules():
                if type(each).__name__.endswith(part) or path.endswith(part):
                    plant(each)
        return module

    monkeypatch.setattr(proof_rows, "random_miniature", planted)
    failed = [gap for gap in forward_gaps(tiny_model(config_of(shape))) if not gap.passed]
    assert failed and failed[0].way == "alone (sdpa)"
    assert failed[0].size > 2 * failed[0].allowed
    assert all(gap.of_gradient for gap in failed) == only_gradients
    with raises(ModelError, "unsupported-model: alone (sdpa)"):
        check_proof(config_of(shape), kind=name, ways=forward_gaps, name="m")


def _stock_forward(monkeypatch):
    """transformers' own, which is not told where documents begin."""

    def forward(part, hidden_states, *_, **__):
        return type(part).__mro__[2].forward(part, hidden_states)

    monkeypatch.setattr(delta_net.DeltaNet, "forward", forward)


def _without_borders(name):
    def plant(monkeypatch):
        whole = getattr(delta_rule, name)

        def planted(*arguments):
            blind = [
                torch.zeros_like(x) if getattr(x, "dtype", None) == torch.int64 else x for x in arguments
            ]
            return whole(*blind)

        monkeypatch.setattr(delta_rule, name, planted)

    return plant


ACROSS = {
    "delta net across documents": _stock_forward,
    "state across documents": _without_borders("chunked"),
    "convolution across documents": _without_borders("convolve"),
}


@pytest.mark.parametrize("name", ACROSS)
def test_a_delta_net_across_documents_is_found(name, monkeypatch):
    """Alone such a document is right: the packed row must find it."""
    ACROSS[name](monkeypatch)
    failed = [gap for gap in forward_gaps(tiny_model(config_of("tiny-qwen3.5"))) if not gap.passed]
    assert failed[0].way == "packed (sdpa)" and failed[0].size > 0.01
    assert not any(gap.way.startswith("alone") for gap in failed)


@pytest.mark.parametrize(
    ("shape", "key"),
    [("tiny-granite", "logits_scaling"), ("tiny-cohere2", "logit_scale")],
)
def test_a_record_that_forgets_a_scale_fails(shape, key, monkeypatch):
    record = dataclasses.replace(ARCHITECTURES[SHAPES[shape]["model_type"]], logit_scale=lambda config: 1.0)
    monkeypatch.setitem(ARCHITECTURES, record.model_type, record)
    with raises(ModelError, "unsupported-model: logprob, alone (sdpa)"):
        check_proof(config_of(shape), kind="scale", ways=forward_gaps, name="m")


def test_a_cap_that_the_record_does_not_read_fails(monkeypatch):
    record = ARCHITECTURES["gemma3_text"]
    record = dataclasses.replace(record, reads=record.reads - {"final_logit_softcapping"})
    monkeypatch.setitem(ARCHITECTURES, record.model_type, record)
    config = config_of("tiny-gemma3", final_logit_softcapping=2.0)
    with raises(ModelError, "unsupported-model: logprob, alone (sdpa)"):
        check_proof(config, kind="cap", ways=forward_gaps, name="m")
    # It does not come that far: a key that transformers reads and the record does not know is refused.
    with raises(ModelError, "unsupported-model: final_logit_softcapping = 2.0"):
        check_architecture(config)


def test_documents_that_see_their_neighbours_are_found():
    """Nothing but causality between the documents of a pack, which begins with the shortest."""
    small = tiny_model(config_of("tiny-llama"))
    own, _ = corpora()
    ids = [token for document in own.ids for token in document]
    blind = proof_rows.Corpus(ids=[ids], prompts=[1])
    whole = proof_rows.eager_figures(small, blind).logprobs[0]
    truth = proof_rows.eager_figures(small, own).logprobs
    start = len(own.ids[0])
    gap = proof_rows.largest_gap("w", [whole[start : start + len(truth[1])]], [truth[1]], [len(own.ids[1])])
    assert gap.size > 0.1 and not gap.passed


def test_gradients_are_compared_by_hand():
    theirs = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    gap = gradient_gap("w", {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([0.0])}, theirs)
    assert gap.size == pytest.approx(0.1) and (gap.ours, gap.theirs) == (4.5, 4.0)
    assert gap.what == "element 1 of the gradient of a"
    missing = gradient_gap("w", {"b": torch.tensor([0.0])}, theirs)
    assert missing.size == 1.0 and missing.ours == 0.0
    # Measured against a hundredth of the whole norm, 5: a difference of 0.05 there is 1.
    small = gradient_gap("w", theirs | {"b": torch.tensor([0.05])}, theirs)
    assert small.size == pytest.approx(1.0)
    assert gradient_gap("w", theirs | {"b": torch.tensor([float("nan")])}, theirs).size == float("inf")


# Models without a record, and records from elsewhere.


def test_a_model_without_a_record_is_admitted_as_generic_and_said_so(caplog):
    config = AutoConfig.for_model(**TINY["tiny-llama"] | {"model_type": "starcoder2"})
    check_architecture(config)
    admit(config, name="m")
    assert "m trains as generic, eager and with engine hf" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "changes", "match"),
    [
        ("gpt2", {}, "unsupported-model: attn_pdrop = 0.1"),
        ("gemma3", {}, "unsupported-model: wrapper, gemma3_text"),
    ],
)
def test_what_no_proof_is_asked_for(model_type, changes, match):
    with raises(ModelError, match):
        check_architecture(AutoConfig.for_model(model_type, **changes))


def test_parts_that_the_small_copy_lacks_are_not_admitted():
    """All three layers before the experts of a DeepSeek V3 are dense, and so is the whole miniature."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8}
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=4, vocab_size=64, **sizes)
    with raises(ModelError, "unsupported-model: no record, DeepseekV3MoE"):
        admit(config, name="m")
    dense = AutoConfig.for_model("deepseek_v3", num_hidden_layers=3, vocab_size=64, **sizes)
    admission._check_parts(dense, tiny_model(dense))  # nothing is lacking
    wide = AutoConfig.for_model("olmoe", num_experts=2**12, num_hidden_layers=2, vocab_size=64)
    with raises(ModelError, "unsupported-model: no record, more than 33,554,432"):
        admit(wide, name="m")


def test_layers_that_are_left_out_in_training_are_refused():
    with raises(ModelError, "unsupported-model: layerdrop = 0.1"):
        check_architecture(AutoConfig.for_model("opt", dropout=0.0, layerdrop=0.1))


def test_a_proof_is_kept_unless_its_record_may_change(monkeypatch):
    ran = []

    def ways(small):
        ran.append(small.model_type)
        return [proof_rows.Gap(way="w", what="x", ours=0.0, theirs=0.0, size=0.0, allowed=1.0)]

    def prove():
        ran.clear()
        for _ in range(2):
            check_proof(config_of("tiny-llama"), kind="kept", ways=ways, name="m")
        return len(ran)

    assert prove() == 1
    record = dataclasses.replace(ARCHITECTURES["llama"], logit_scale=lambda config: 2.0)
    monkeypatch.setitem(ARCHITECTURES, "llama", record)
    assert prove() == 2


def test_what_is_never_compiled_has_no_row_of_it():
    values = TINY["tiny-llama"] | {"model_type": "starcoder2"}
    with raises(ModelError, "unsupported-model: starcoder2, train eager"):
        SLOW_MODES["compiled"](tiny_model(AutoConfig.for_model(**values)))


def test_an_auxiliary_loss_is_said_to_be_missing(caplog):
    check_architecture(config_of("tiny-qwen3-moe"))
    assert not caplog.text
    check_architecture(config_of("tiny-qwen3-moe", output_router_logits=True))
    assert "auxiliary loss of the router; Lockstep goes by" in caplog.text


PACKAGE = {
    "arcee_record.py": """
        from lockstep.invariant.forms import RMSNorm, Rotary
        from lockstep.models.architectures.record import PLAN, SIZES, Architecture

        RECORD = Architecture(
            model_type="arcee",
            title="Arcee",
            reads=SIZES | {"attention_bias", "hidden_act", "mlp_bias"},
            forms={"ArceeRMSNorm": RMSNorm(), "ArceeRotaryEmbedding": Rotary()},
            tensor_parallel=PLAN,
            batch_invariant=False,
        )
    """,
    "arcee_record-1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: arcee-record\\nVersion: 1\\n",
    "arcee_record-1.dist-info/entry_points.txt": "[lockstep.architectures]\\narcee = arcee_record:RECORD\\n",
}
CHECK = """
    from transformers import AutoConfig
    from lockstep.engine.spec import decoded_gap
    from lockstep.models.architectures import ARCHITECTURES, check_architecture, silence_transformers
    from lockstep.models.miniature import tiny_model
    from lockstep.models.proof_rows import forward_gaps

    config = AutoConfig.for_model("arcee", num_hidden_layers=2, attention_bias=True)
    check_architecture(config)
    small = tiny_model(config)
    gaps = [*forward_gaps(small), *(decoded_gap(engine, small) for engine in ("hf", "native"))]
    assert all(gap.passed for gap in gaps)
    print(ARCHITECTURES["arcee"].title, len(gaps))
"""


def test_a_package_adds_an_architecture(tmp_path):
    """Its record, 10 lines, and an entry point; then the engine decodes it, too."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text.replace("\\n", "\n")))
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.append({str(tmp_path)!r})" + textwrap.dedent(CHECK),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["Arcee 26"], done.stderr


def test_two_records_of_one_architecture_are_an_error():
    from lockstep.models.architectures import register

    other = dataclasses.replace(ARCHITECTURES["llama"], title="mine")
    with pytest.raises(ValueError, match="'llama' has a record already"):
        register(other)
    register(ARCHITECTURES["llama"])
