import torch

from lockstep.packing import Bucket, pack
from lockstep.schema.batch import RolloutSample, policy_samples


def sample(sample_id: int, length: int) -> RolloutSample:
    return RolloutSample(
        token_ids=torch.zeros(length, dtype=torch.int64),
        loss_mask=torch.arange(length) < length - 1,
        sample_id=sample_id,
        rollout_logprobs=torch.zeros(length),
        policy_version=0,
    )


def test_the_references_logprobs_find_their_slots_whatever_the_order_of_the_pack() -> None:
    refs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]), torch.tensor([6.0])]
    made = policy_samples([sample(0, 2), sample(1, 3), sample(2, 1)], None, ref_logprobs=refs)
    weights = [torch.ones(1), torch.ones(2)]
    batch = pack([made[2], made[0]], weights, bucket=Bucket(tokens=5, documents=4, max_seqlen=4))
    assert batch.ref_logprobs.tolist() == [6.0, 1.0, 2.0, 0.0, 0.0]
    assert [values.tolist() for values in batch.split(batch.ref_logprobs)] == [[6.0], [1.0, 2.0]]
