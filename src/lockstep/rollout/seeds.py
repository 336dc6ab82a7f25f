"""Seeds of samples: a pure function of the sample's position in the run."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Return the 63-bit seed of one sample: the first 8 bytes of BLAKE2b over the four numbers, without the
    top bit.

    Args:
        run_seed: RunConfig.seed.
        step: rollout step; negative numbers are free for evaluations.
        prompt_index: Prompt.index, so that the seed does not depend on the position in the batch.
        sample_index: 0 to group_size - 1; resampling rounds continue the count.
    """
    text = f"lockstep sample {run_seed} {step} {prompt_index} {sample_index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
