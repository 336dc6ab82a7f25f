"""Against lockstep.engine.noise's own draw, which works on probabilities instead of logarithms."""

import pytest
import torch
import torch.nn.functional as F

from lockstep.engine.native.choose import choose
from lockstep.engine.noise import noise_keys, sample_blocks
from lockstep.ops.logprobs import HeadOptions


def keys_of(count: int) -> torch.Tensor:
    return noise_keys(torch.arange(count), torch.arange(count) * 7 + 1)


@pytest.mark.parametrize("vocab", [320, 512, 3001])
@pytest.mark.parametrize("head", [HeadOptions(temperature=0.7), HeadOptions(softcap=5.0, logit_scale=0.3)])
def test_the_tokens_are_those_of_the_draw_over_blocks(vocab, head):
    logits = torch.randn(400, vocab, generator=torch.Generator().manual_seed(1)) * 4
    keys = keys_of(400)
    x = logits * head.scale if head.cap is None else head.cap * torch.tanh(logits * head.scale / head.cap)
    weights = F.pad(torch.softmax(x, -1), (0, -vocab % 256))
    assert torch.equal(choose(logits, keys, head), sample_blocks(weights, keys))


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(33, 700, generator=torch.Generator().manual_seed(2)).bfloat16()
    together = choose(logits, keys_of(33), HeadOptions())
    alone = [choose(logits[i : i + 1], keys_of(33)[i : i + 1], HeadOptions()) for i in range(33)]
    assert together.tolist() == torch.cat(alone).tolist()


def test_what_is_forbidden_is_never_drawn_even_where_whole_blocks_are():
    logits = torch.full((200, 1000), float("-inf"))
    logits[:, 999], logits[:, 3] = 0.0, 0.0
    drawn = choose(logits, keys_of(200), HeadOptions())
    assert set(drawn.tolist()) == {3, 999}
    assert 70 < int((drawn == 3).sum()) < 130  # half of 200, +- 4 standard deviations


def test_logits_that_are_not_finite_still_give_a_token_of_the_vocabulary():
    for value in (float("nan"), float("inf")):
        logits = torch.zeros(4, 300)
        logits[1, 299] = value
        logits[2] = value
        drawn = choose(logits, keys_of(4), HeadOptions())
        assert ((drawn >= 0) & (drawn < 300)).all()
