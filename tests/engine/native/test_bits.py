"""The engine's logprobs are the trainer's, to the bit, however a sample came about."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from native_parts import ROOMY, TIGHT, generated, policy, requests

from lockstep.config.engine import EngineConfig
from lockstep.config.train import TrainConfig
from lockstep.engine.build import make_engine
from lockstep.execution import CompileWatch
from lockstep.packing.packs import Bucket, pack
from lockstep.schema.batch import TrainSample
from lockstep.train.local import LocalBackend


def trainers_logprobs(model, completions, temperature=0.7, execution="eager"):
    """[n] of all completion tokens, from one pack that is longer than the documents."""
    samples = []
    for c in completions:
        ids = torch.tensor(c.prompt_token_ids + c.token_ids)
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[len(c.prompt_token_ids) - 1 : -1] = True
        samples.append(TrainSample(token_ids=ids, loss_mask=mask))
    bucket = Bucket(tokens=1024, documents=16, max_seqlen=256)
    batch = pack(samples, [s.loss_mask.float() for s in samples], bucket=bucket)
    config = TrainConfig(attention="varlen", execution=execution)
    trainer = LocalBackend(config, model=model, total_steps=0, temperature=temperature)
    (found,) = trainer.logprobs([batch])
    return found[batch.loss_mask]


def engines_logprobs(completions):
    return torch.cat([torch.tensor(c.logprobs) for c in completions])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("tiny-llama", "float32"),
        ("tiny-qwen3", "bfloat16"),
        ("tiny-gemma3", "bfloat16"),
        ("tiny-mistral", "float32"),
    ],
)
def test_prefill_decode_preemption_and_the_pack_agree_to_the_bit(shape, dtype):
    model = policy(shape, dtype)
    roomy, _ = generated(model, requests(), **ROOMY)
    tight, engine = generated(model, requests(), **TIGHT)
    assert engine.counts.preemptions > 0 and engine.counts.prefill_forwards > 6
    assert [c.token_ids for c in tight] == [c.token_ids for c in roomy]
    assert [c.logprobs for c in tight] == [c.logprobs for c in roomy]
    assert sum(c.cached_tokens for c in roomy) == 3 * 6 + 3 * 89 + 32
    assert torch.equal(engines_logprobs(tight), trainers_logprobs(model, tight))
    assert engine.contract is not None and engine.contract.dtype == dtype


def test_rows_of_several_kinds_keep_their_bits():
    """Greedy, shaped and plain rows in one batch are sampled one by one, from the same logits."""
    model = policy("tiny-llama", "float32")
    plain, _ = generated(model, requests(), **ROOMY)
    shaped = dataclasses.replace(requests()[1].sampling, top_p=0.8, min_tokens=3)
    mixed = [*requests(), *requests(0.0), dataclasses.replace(requests()[1], sampling=shaped)]
    completions, _ = generated(model, mixed, **ROOMY)
    count = len(plain)
    assert [c.token_ids for c in completions[:count]] == [c.token_ids for c in plain]
    assert [c.logprobs for c in completions[:count]] == [c.logprobs for c in plain]
    greedy, nucleus = completions[count : 2 * count], completions[2 * count :]
    assert torch.equal(engines_logprobs(greedy), trainers_logprobs(model, greedy, 0.0))
    assert torch.equal(engines_logprobs(nucleus), trainers_logprobs(model, nucleus))
    assert [c.token_ids for c in nucleus] != [c.token_ids for c in plain[2:6]]


def test_without_invariant_ops_the_bits_differ_and_there_is_no_contract():
    model = policy("tiny-llama", "float32", converted=False)
    completions, engine = generated(model, requests(), **TIGHT)
    found, wanted = engines_logprobs(completions), trainers_logprobs(model, completions)
    assert engine.contract is None
    assert not torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_compiled_layers_agree_to_the_bit_and_are_compiled_once_per_size_and_kind():
    model = policy("tiny-gemma3", "bfloat16", execution="compile")
    watch = CompileWatch()
    engine = make_engine(EngineConfig(name="native", **(ROOMY | {"max_batch": 12})), model=model)
    asked = requests()
    completions = [c for row in engine.generate(asked) for c in row]
    # prefill of 64 and 12 rows, each for layers with and without a sliding window
    assert watch.report().graphs == 4 and watch.report().graph_breaks == 0
    longer = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=60)) for r in asked]
    engine.generate(longer)
    assert watch.report().graphs == 4, "a larger cache was a reason to compile again"
    wanted = trainers_logprobs(model, completions, execution="compile")
    assert torch.equal(engines_logprobs(completions), wanted)
