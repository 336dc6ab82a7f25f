"""Against lockstep.engine.sampling's own draw, which works on probabilities instead of logarithms."""

import pytest
import torch
import torch.nn.functional as F

from lockstep.engine.native import draw as chosen
from lockstep.engine.native.draw import block_mass, choose, scaled
from lockstep.engine.sampling import BLOCK, ENTRY_COUNTER, noise_keys, sample_blocks, uniform
from lockstep.execution import CompileWatch
from lockstep.invariant import cases, dependence
from lockstep.ops import logprobs
from lockstep.ops.logprobs import HeadOptions


def places(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions."""
    return torch.arange(count), torch.arange(count) * 7 + 1


@pytest.mark.parametrize("vocab", [320, 512, 3001])
@pytest.mark.parametrize("head", [HeadOptions(temperature=0.7), HeadOptions(softcap=5.0, logit_scale=0.3)])
def test_the_tokens_are_those_of_the_draw_over_blocks(vocab, head):
    logits = torch.randn(400, vocab, generator=torch.Generator().manual_seed(1)) * 4
    x = logits * head.scale if head.cap is None else head.cap * torch.tanh(logits * head.scale / head.cap)
    weights = F.pad(torch.softmax(x, -1), (0, -vocab % 256))
    expected = sample_blocks(weights, noise_keys(*places(400)))
    assert torch.equal(choose(logits, *places(400), head), expected)


HEADS = [
    HeadOptions(),
    HeadOptions(temperature=0.7),
    HeadOptions(temperature=0.0, logit_scale=1 / 3),
    HeadOptions(temperature=1.3, softcap=30.0),
    HeadOptions(temperature=0.9, softcap=7.0, logit_scale=0.3),
]


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_scaled_as_the_trainer_scales_them_to_the_bit(head, dtype):
    logits = (torch.randn(9, 1003, generator=torch.Generator().manual_seed(3)) * 8).to(dtype)
    assert torch.equal(scaled(logits, head), logprobs._scaled(logits, head.scale, head.cap))
    factor, cap = (None if x is None else torch.full((), x) for x in chosen._factors(head))
    assert torch.equal(chosen._scaled(logits, factor, cap), scaled(logits, head)), "tensors for numbers"


@pytest.mark.parametrize("invariant", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(invariant):
    logits = torch.randn(33, 700, generator=torch.Generator().manual_seed(2)).bfloat16()
    how = {"head": HeadOptions(), "invariant": invariant}
    seeds, positions = places(33)
    together = choose(logits, seeds, positions, **how)
    rows = [slice(i, i + 1) for i in range(33)]
    alone = [choose(logits[row], seeds[row], positions[row], **how) for row in rows]
    assert together.tolist() == torch.cat(alone).tolist()


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("vocab", [200, 1000, 32_001])
def test_the_mass_of_blocks_by_the_row_invariant_op(head, vocab):
    logits = torch.randn(70, vocab, generator=torch.Generator().manual_seed(4)).bfloat16() * 3
    logits[:, :150] = float("-inf")
    logits[3, :] = float("-inf")
    mass = block_mass(logits, head, invariant=True)
    assert mass.dtype == torch.float32 and mass.shape == (70, -(-vocab // BLOCK))
    torch.testing.assert_close(mass, block_mass(logits, head), rtol=1e-6, atol=1e-5)
    assert dependence(lambda x: block_mass(x, head, invariant=True), logits) is None
    assert cases._BLOCK == BLOCK


def test_temperatures_share_the_compiled_pass():
    """More of them than dynamo's limit of graphs per function, which fullgraph makes an error."""
    torch._dynamo.reset()
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(5))
    watch = CompileWatch()
    for step in range(torch._dynamo.config.recompile_limit + 2):
        head = HeadOptions(temperature=0.5 + step / 8)
        mass = block_mass(logits, head, compiled=True)
        torch.testing.assert_close(mass, block_mass(logits, head), rtol=1e-6, atol=1e-5)
    assert watch.report().graphs == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, as nothing else compiles the noise")
def test_compiled_noise_is_the_noise_to_the_bit():
    torch._dynamo.reset()
    with torch.device("cuda"):
        for rows in (1, 2, 4, 16, 100, 256):
            seeds, positions = places(rows)
            keys = noise_keys(seeds, positions)
            assert torch.equal(chosen._compiled(noise_keys, dynamic=True)(seeds, positions), keys)
            for counters in (torch.arange(501), torch.arange(rows * BLOCK).view(rows, BLOCK) + ENTRY_COUNTER):
                compiled = chosen._compiled(uniform, dynamic=True)(keys, counters)
                assert torch.equal(compiled, uniform(keys, counters)), rows


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, as nothing else compiles the draw")
@pytest.mark.parametrize("head", HEADS[:4], ids=str)
def test_the_compiled_draw_is_the_draw(head):
    torch._dynamo.reset()
    with torch.device("cuda"):
        for rows in (1, 16, 100):
            logits, (seeds, positions) = (torch.randn(rows, 32_001) * 4).bfloat16(), places(rows)
            how = {"head": head, "invariant": True}
            compiled = choose(logits, seeds, positions, compiled=True, **how)
            assert torch.equal(compiled, choose(logits, seeds, positions, **how)), rows


def test_what_is_forbidden_is_never_drawn_even_where_whole_blocks_are():
    logits = torch.full((200, 1000), float("-inf"))
    logits[:, 999], logits[:, 3] = 0.0, 0.0
    drawn = choose(logits, *places(200), HeadOptions())
    assert set(drawn.tolist()) == {3, 999}
    assert 70 < int((drawn == 3).sum()) < 130  # half of 200, +- 4 standard deviations


def test_logits_that_are_not_finite_still_give_a_token_of_the_vocabulary():
    for value in (float("nan"), float("inf")):
        logits = torch.zeros(4, 300)
        logits[1, 299] = value
        logits[2] = value
        drawn = choose(logits, *places(4), HeadOptions())
        assert ((drawn >= 0) & (drawn < 300)).all()
