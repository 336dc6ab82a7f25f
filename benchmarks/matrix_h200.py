"""Recordings for the compatibility matrix on one GPU: the length sets of benchmarks/lengths.json.

    python benchmarks/matrix_h200.py make --out runs/lengths
    benchmarks/matrix_h200.sh ...

`make` writes two recordings of random ids: rl_512 as micro-batches whose documents also fit 4,096 slots when
padded (rows x longest), and rl_32 as one input. Lengths are in the order of the file; nothing was recorded of outputs.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import torch

import lockstep
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.recording import RecordingWriter
from lockstep.schema.batch import PackedBatch, TrainSample
from lockstep.schema.recording import InputMeta, RecordedInput, RecordingHeader

VOCAB = 49152
PROMPT_SHARE = 0.25


def samples_of(lengths: list[int]) -> list[TrainSample]:
    """One document per length; what follows the first quarter is trained on."""
    samples = []
    for index, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(index)
        mask = torch.arange(length) >= int(length * PROMPT_SHARE)
        mask[-1] = False
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        samples.append(TrainSample(token_ids=ids, loss_mask=mask, sample_id=index))
    return samples


def header(name: str, *, token_budget: int, max_seqlen: int, documents: int) -> RecordingHeader:
    return RecordingHeader(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        framework="lockstep",
        versions={"lockstep": lockstep.__version__, "torch": torch.__version__},
        model={"name": "shape:llama-3.1-8b", "dtype": "bfloat16"},
        vocab_size=VOCAB,
        algorithm={"name": "sft"},
        temperature=1.0,
        max_tokens=None,
        axes={
            "backend": "local",
            "attention": "varlen",
            "execution": "eager",
            "layout": "packed",
            "padding_side": "right",
            "device": "cuda",
            "dtype": "bfloat16",
            "static_capacity": False,
            "activation_checkpointing": False,
        },
        capacity={"token_budget": token_budget, "max_seqlen": max_seqlen, "max_documents": documents},
        notes={"lengths": name, "token_ids": "uniform random"},
    )


def write(out: Path, name: str, batches: list[PackedBatch]) -> None:
    """One optimizer step per input: they are independent."""
    longest = max(max(b.lengths) for b in batches)
    slots, documents = max(b.num_slots for b in batches), max(len(b.sample_ids) for b in batches)
    head = header(name, token_budget=slots, max_seqlen=longest, documents=documents)
    with RecordingWriter(out, head) as writer:
        for index, batch in enumerate(batches):
            meta = InputMeta(step=index, update=index, micro_batch=0, num_micro_batches=1)
            writer.finish([RecordedInput(meta=meta, batch=batch, outputs=None)])
    print(
        f"{out}: {len(batches)} inputs, {sum(b.num_tokens for b in batches)} tokens, longest document {longest}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    lengths = json.loads((Path(__file__).parent / "lengths.json").read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    for name, limits in {
        "rl_512": PackLimits(token_budget=4096, layout="padded"),
        "rl_32": PackLimits(token_budget=sum(lengths["rl_32"])),
    }.items():
        samples = samples_of(lengths[name])
        trained = sum(s.num_trained for s in samples)
        weights = [s.loss_mask.float() / trained for s in samples]
        write(args.out / name, name, plan_micro_batches(samples, weights, limits))


if __name__ == "__main__":
    main()
