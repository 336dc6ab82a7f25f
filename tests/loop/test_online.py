import torch

from lockstep.loop.online import _packed
from lockstep.packing import Bucket, pack
from lockstep.schema.batch import TrainSample


def sample(sample_id: int, length: int) -> TrainSample:
    mask = torch.arange(length) < length - 1
    return TrainSample(token_ids=torch.zeros(length, dtype=torch.int64), loss_mask=mask, sample_id=sample_id)


def test_figures_of_samples_find_their_slots_whatever_the_order_of_the_pack() -> None:
    figures = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]), torch.tensor([6.0])]
    samples = [sample(2, 1), sample(0, 2)]
    batch = pack(
        samples, [torch.ones(len(s)) for s in samples], bucket=Bucket(tokens=5, documents=4, max_seqlen=4)
    )
    assert _packed(batch, figures).tolist() == [6.0, 1.0, 2.0, 0.0, 0.0]
