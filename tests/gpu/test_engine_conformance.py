"""The conformance suite on a GPU, on the engine of LOCKSTEP_GPU_ENGINE: a JSON file of EngineConfig fields.

LOCKSTEP_GPU_ENGINE=vllm.json python -m pytest tests/gpu
"""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
pytest.register_assert_rewrite("conformance")

import torch  # noqa: E402
from conformance import *  # noqa: E402, F403
from conformance import MAX_MODEL_LEN, VOCAB, Subject, conformance_model  # noqa: E402
from conformance_parts import EOS, TEMPERATURES  # noqa: E402

SETTINGS = os.environ.get("LOCKSTEP_GPU_ENGINE")
pytestmark = pytest.mark.skipif(SETTINGS is None, reason="LOCKSTEP_GPU_ENGINE names no engine")
REFUSES = {
    "vllm": frozenset({"min_tokens with stop"}),
    "sglang": frozenset({"min_tokens", "penalties", "min_tokens with stop"}),
}


class Weights:
    """A train backend's end of a push."""

    def __init__(self, model):
        self.model = model

    def weights(self, *, policy_version):
        from lockstep.schema.weights import WeightUpdate

        state = self.model.module.state_dict
        return WeightUpdate(policy_version=policy_version, tensors=lambda: iter(state().items()))


def native_subject(config, model):
    """The embedded engine, over a converted module: tokens must not depend on the batch."""
    from lockstep import invariant
    from lockstep.engine.build import make_engine
    from lockstep.schema.weights import WeightUpdate

    invariant.configure_cuda()
    invariant.convert(model.module)
    engine = make_engine(config, model=model)

    def push(version):
        update = WeightUpdate(policy_version=version, tensors=lambda: iter(()), shared_module=model.module)
        engine.update_weights(update)

    push(1)
    # bfloat16, against eager attention. Seen at most: 0.58, over turns of a model with large logits (H100).
    yield Subject(engine=engine, model=model, push=push, version=1, tolerance=0.8, exact=False)
    engine.close()


@pytest.fixture(scope="module", params=["untied", "tied"])
def subject(request, tmp_path_factory):
    from lockstep.config.engine import EngineConfig
    from lockstep.engine.build import make_engine
    from lockstep.engine.spec import EngineSpec
    from lockstep.loop.engines import write_model_folder
    from lockstep.transfer import make_transfer

    settings = json.loads(Path(SETTINGS).read_text())
    dtype = settings.pop("dtype", "float32")
    config = EngineConfig(**settings)
    model = conformance_model(tied=request.param == "tied", dtype=getattr(torch, dtype), device="cuda:0")
    if config.name == "native":
        yield from native_subject(config, model)
        return
    folder = tmp_path_factory.mktemp(request.param)
    temperatures = (0.0, 1.0) if config.name == "vllm" else TEMPERATURES
    spec = EngineSpec(
        folder=write_model_folder(model, folder / "model"),
        weights="pushed",
        model_name=model.name,
        dtype=dtype,
        vocab_size=VOCAB,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(EOS,),
        tokenizer=model.tokenizer,
        device="cuda:0",
        shares_device=True,
        temperatures=frozenset(temperatures),
        work_dir=folder,
    )
    engine = make_engine(config, spec=spec)
    transfer = make_transfer(config, engine, device="cuda:0", work_dir=folder)

    def push(version):
        transfer.push(Weights(model), engine, policy_version=version)

    push(1)
    seeded = config.name != "sglang" or config.batch_invariant
    yield Subject(
        engine=engine,
        model=model,
        push=push,
        version=1,
        temperatures=temperatures,
        refuses=REFUSES[config.name] | ({"min_p"} if config.name == "sglang" and seeded else frozenset()),
        # Engines' GPU kernels round float32 as tf32. Seen at most: 0.034 (float32), 0.40 (bfloat16).
        tolerance=0.06 if dtype == "float32" else 0.5,
        exact=False,
        seeded=seeded,
        sleeps=config.offload,
    )
    transfer.close()
    engine.close()
