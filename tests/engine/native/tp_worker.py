"""One rank of test_tp.py: an engine that two ranks run together, beside an engine with the whole model. The
first rank prints what it found as JSON."""

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from native_parts import TIGHT, generated, policy, requests

from lockstep import invariant
from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.engine.build import make_engine
from lockstep.models.load import allocated, load_model
from lockstep.models.tensor_parallel import apply_tensor_parallel, tensor_parallel_plan
from lockstep.processes.child import relax_gc
from lockstep.ranks.context import init_ranks
from lockstep.schema.rollout import SamplingParams
from lockstep.schema.weights import WeightPart, WeightUpdate

SHAPE, DTYPE = "tiny-llama", "float32"
CPU = torch.device("cpu")


def part_of(whole):
    """The engine of this rank's part, with the weights of the model `whole`."""
    config = ModelConfig(name=f"shape:{SHAPE}", dtype=DTYPE)
    own = load_model(config, attention="varlen", device=CPU, materialize=False)
    invariant.convert(own.module)
    group = dist.group.WORLD
    plan = tensor_parallel_plan(own.module, size=group.size())
    tp = apply_tensor_parallel(own.module, group=group, plan=plan)
    own = dataclasses.replace(allocated(own, device=CPU), tp=tp)

    def parts():
        for name, parameter in whole.module.named_parameters():
            dim, start, stop = tp.bounds(name) or (0, 0, len(parameter))
            yield name, parameter.detach().narrow(dim, start, stop - start)

    shapes = {name: tuple(part.shape) for name, part in parts()}
    part = WeightPart(group=group, plan="lockstep", tensors=parts, shapes=shapes)
    engine = make_engine(EngineConfig(name="native", **TIGHT), model=own)
    engine.update_weights(WeightUpdate(policy_version=3, tensors=lambda: iter(()), part=part))
    return engine


def compared(engine, whole, asked, *, ahead):
    """How the samples of both engines differ."""
    engine.ahead = ahead
    if dist.get_rank():
        engine.follow()
        return {}
    with engine.leading():
        found = [c for row in engine.generate(asked) for c in row]
    expected, _ = generated(whole, asked, ahead=ahead, **TIGHT)
    gaps = [
        abs(a - b)
        for mine, theirs in zip(found, expected, strict=True)
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)
    ]
    return {
        "other_tokens": sum(a.token_ids != b.token_ids for a, b in zip(found, expected, strict=True)),
        "gap": max(gaps),
        "samples": len(found),
    }


def raises_in_the_lead(engine):
    """An error of the first rank, before it has sampled anything, lets the others go."""
    if dist.get_rank():
        engine.follow()
        return True
    try:
        with engine.leading():
            raise ArithmeticError
    except ArithmeticError:
        return True


def main():
    torch.set_num_threads(1)
    with init_ranks(device="cpu", seconds=60.0) as ranks:
        whole = policy(SHAPE, DTYPE)
        engine = part_of(whole)
        shaped = [
            dataclasses.replace(
                r, sampling=SamplingParams(max_tokens=30, temperature=0.7, top_p=0.8, top_k=30)
            )
            for r in requests()
        ]
        found = {
            "plain": compared(engine, whole, requests(), ahead=0),
            "ahead": compared(engine, whole, requests(), ahead=1),
            "shaped": compared(engine, whole, shaped, ahead=0),
            "ended": raises_in_the_lead(engine),
            "heads": engine._layers.shape.heads,
            "preemptions": engine.counts.preemptions,
            "collectives": engine.contract.collectives,
        }
        sizes = [sum(p.numel() for p in m.parameters()) for m in (engine._module, whole.module)]
        found["share"] = sizes[0] / sizes[1]
        if ranks.rank == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    relax_gc()
    main()
