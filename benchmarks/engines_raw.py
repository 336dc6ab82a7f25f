"""The raw engine beside which benchmarks/engines.py measures ours: vLLM's LLM or SGLang's Engine.

    python benchmarks/engines_raw.py vllm|sglang JOB.json

JOB: model (a folder with weights), prompts, max_tokens, seeds, memory_fraction, options. For each line "go"
on standard input it generates once and prints {"seconds": S, "tokens": N}; "keep FILE" writes ids and
logprobs of the last time; the end of its input ends it. Runs in the engine's own environment, without
Lockstep.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[], tuple[list[list[int]], Callable[[], list[list[float]]]]]
"""Token ids of every sample, and a function for their logprobs, which are not taken apart in its time."""


def make_vllm(job: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        gpu_memory_utilization=job["memory_fraction"],
        max_model_len=job["max_model_len"],
        max_num_seqs=256,
        seed=0,
        **job["options"],
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    params = [
        SamplingParams(max_tokens=job["max_tokens"], ignore_eos=True, logprobs=0, detokenize=False, seed=seed)
        for seed in job["seeds"]
    ]

    def generate() -> tuple[list[list[int]], Callable[[], list[list[float]]]]:
        outputs = [output.outputs[0] for output in engine.generate(prompts, params, use_tqdm=False)]

        def logprobs() -> list[list[float]]:
            return [
                [step[i].logprob for step, i in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs
            ]

        return [list(o.token_ids) for o in outputs], logprobs

    return generate


def make_sglang(job: dict[str, Any]) -> Generate:
    import sglang

    engine = sglang.Engine(
        model_path=job["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        mem_fraction_static=job["memory_fraction"],
        context_length=job["max_model_len"],
        max_running_requests=256,
        random_seed=0,
        skip_server_warmup=True,
        **job["options"],
    )
    params = {"max_new_tokens": job["max_tokens"], "ignore_eos": True, "temperature": 1.0}

    def generate() -> tuple[list[list[int]], Callable[[], list[list[float]]]]:
        outputs = engine.generate(input_ids=job["prompts"], sampling_params=params, return_logprob=True)

        def logprobs() -> list[list[float]]:
            return [[t[0] for t in o["meta_info"]["output_token_logprobs"]] for o in outputs]

        return [o["output_ids"] for o in outputs], logprobs

    return generate


def main() -> None:
    job = json.loads(Path(sys.argv[2]).read_text())
    generate = {"vllm": make_vllm, "sglang": make_sglang}[sys.argv[1]](job)
    generate()  # compiles, captures
    print(json.dumps({"ready": True}), flush=True)
    ids: list[list[int]] = []
    logprobs: Callable[[], list[list[float]]] = list
    for line in sys.stdin:
        word, _, path = line.strip().partition(" ")
        if word == "go":
            started = time.perf_counter()
            ids, logprobs = generate()
            seconds = time.perf_counter() - started
            print(json.dumps({"seconds": seconds, "tokens": sum(map(len, ids))}), flush=True)
        elif word == "keep":
            Path(path).write_text(json.dumps({"ids": ids, "logprobs": logprobs()}))
            print(json.dumps({"kept": True}), flush=True)


if __name__ == "__main__":
    main()
