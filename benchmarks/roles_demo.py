"""Do a reward model, PPO against it and the preference losses learn a task that only a verifier can tell?

    python benchmarks/roles_demo.py --out FOLDER --json FILE [--device cuda]

The task is adding and subtracting two numbers (reasoning_gym's chain_sum) with SmolLM2-135M:

pairs        samples of the model, scored by the verifier, made into pairs by `lockstep select --pairs
             --ends-in-number`: both answers end in a number, and one of them is right. The held-out pairs
             are of problems that no training pair has.
rm           `lockstep train rm` on the training pairs: share of the held-out pairs in which the right answer
             scores higher. Beside it the best that length alone can do: the longer or the shorter answer,
             whichever is right more often.
ppo          `lockstep train ppo` with that reward model as its only reward; the verifier looks on, at
             weight 0.
preferences  `lockstep train dpo` with each of five losses, from the model as it is: share of the held-out
             pairs in which the policy raised the right answer's log-probability more than the other one's; at
             the start 0.5.

Each part runs the command that a user would, in a process of its own; one that has run is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import transformers

MODEL = "bundled:smollm2-135m"
LOSSES = {"dpo": "3e-5", "ipo": "3e-5", "simpo": "3e-5", "kto": "3e-5", "orpo": "5e-5"}
"""Each with its learning rate."""
COMMON = {"--train.schedule": "linear", "--train.warmup-steps": "4", "--train.betas": ["0.9", "0.95"]}


def main(argv: list[str]) -> int:
    """Run the parts, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for data, runs and logs")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--parts", nargs="+", default=["pairs", "rm", "ppo", "preferences"])
    parser.add_argument("--digits", type=int, default=1, help="most digits of a number")
    parser.add_argument("--problems", type=int, nargs=2, default=[140, 60], help="to train on, held out")
    parser.add_argument("--n", type=int, default=256, help="samples of each problem")
    parser.add_argument(
        "--pairs", type=int, nargs=2, default=[60, 500], help="of each problem, held out in all"
    )
    parser.add_argument("--steps", type=int, nargs=3, default=[300, 160, 60], help="of rm, ppo, preferences")
    parser.add_argument("--batch", type=int, default=32, help="pairs of a step")
    parser.add_argument("--side-by-side", type=int, default=1, help="preference runs at a time")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "command": ["benchmarks/roles_demo.py", *argv],
        "machine": machine(args.device),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    parts = {"pairs": make_pairs, "rm": reward_model, "ppo": ppo, "preferences": preferences}
    for name in args.parts:
        begun = time.monotonic()
        result[name] = parts[name](args)
        result[name]["seconds"] = round(time.monotonic() - begun, 1)
        print(name, json.dumps({k: v for k, v in result[name].items() if not isinstance(v, list | dict)}))
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def make_pairs(args: argparse.Namespace) -> dict[str, Any]:
    """Sample, score and select; the held-out pairs are cut to the number that was asked for."""
    train, held_out = problems(args.digits, args.problems)
    found: dict[str, Any] = {}
    for name, rows, most in (("train", train, args.pairs[0]), ("held_out", held_out, 1000)):
        folder = args.out / name
        folder.mkdir(exist_ok=True)
        write(folder / "problems.jsonl", rows)
        lockstep(
            args,
            ["generate", "--model", MODEL, "--data", folder / "problems.jsonl", "--n", args.n],
            ["--max-tokens", 32, "--temperature", 0.7, "--out", folder / "samples.jsonl"],
            log=folder / "generate.log",
        )
        lockstep(
            args,
            ["score", "--data", folder / "samples.jsonl", "--out", folder / "scored.jsonl"],
            ["--reward", '{name = "math", answer = "last_number"}'],
            log=folder / "score.log",
        )
        lockstep(
            args,
            ["select", "--data", folder / "scored.jsonl", "--pairs", most, "--ends-in-number", "--finished"],
            ["--out", folder / "pairs.jsonl", "--overwrite"],
            log=folder / "select.log",
        )
        scored, pairs = read(folder / "scored.jsonl"), read(folder / "pairs.jsonl")
        if name == "held_out":
            pairs = evenly(pairs, args.pairs[1])
            write(folder / "pairs.jsonl", pairs)
        write(folder / "answers.jsonl", unpaired(pairs))
        found |= {
            f"{name}_accuracy": sum(row["reward"] for row in scored) / len(scored),
            f"{name}_pairs": len(pairs),
            f"{name}_problems": len({json.dumps(row["prompt"]) for row in pairs}),
        }
    return found


def reward_model(args: argparse.Namespace) -> dict[str, Any]:
    """Train one, and compare with what length can tell."""
    run = args.out / "rm"
    steps, batch = args.steps[0], args.batch
    lockstep(
        args,
        ["train", "rm", "--data.source", args.out / "train/pairs.jsonl", "--train.lr", "5e-5"],
        ["--eval-data.source", args.out / "held_out/pairs.jsonl", "--eval-every", max(1, steps // 5)],
        training(args, steps, run, batch),
        log=args.out / "rm.log",
    )
    rows = read(run / "metrics.jsonl")
    curve = [(row["step"], row["eval/accuracy"]) for row in rows if "evaluation" in row]
    lengths = [
        (len(answer_text(row["chosen"])), len(answer_text(row["rejected"])))
        for row in read(args.out / "held_out/pairs.jsonl")
    ]
    longer = [(good > bad) + 0.5 * (good == bad) for good, bad in lengths]
    by_length = sum(longer) / len(longer)
    return {
        "steps": steps,
        "held_out_accuracy": curve[-1][1],
        "length_only": max(by_length, 1 - by_length),
        "curve": curve,
    }


def ppo(args: argparse.Namespace) -> dict[str, Any]:
    """PPO against the reward model; the verifier's accuracy and the model's score over the steps."""
    run, steps = args.out / "ppo", args.steps[1]
    config = args.out / "ppo.toml"
    config.write_text(
        f'''kind = "ppo"

[model]
name = "{MODEL}"

[data]
source = "{args.out / "train/problems.jsonl"}"
max_prompt_tokens = 96

[eval_data]
source = "{args.out / "held_out/problems.jsonl"}"
max_prompt_tokens = 96

[rollout]
prompts_per_step = 8
group_size = 8

[rollout.sampling]
max_tokens = 24

[[rewards]]
name = "math"
answer = "last_number"
weight = 0.0

[reward_model]
name = "{args.out / "rm/export"}"

[algorithm.kl]
coef = 0.02
place = "reward"

[train]
lr = 1e-5

[value]
lr = 2e-5

[eval]
every = {max(1, steps // 16)}
num_prompts = {min(256, args.problems[1])}
before_max_tokens_factor = 1
'''
    )
    lockstep(args, ["train", config], training(args, steps, run), log=args.out / "ppo.log")
    rows = read(run / "metrics.jsonl")
    evaluations = [row for row in rows if "evaluation" in row]
    verified = [(row["step"], row["eval/lenient_accuracy"]) for row in evaluations]
    return {
        "steps": steps,
        "verifier_start": verified[0][1],
        "verifier_best": max(value for _, value in verified),
        "verifier_last": verified[-1][1],
        "verifier": verified,
        "reward_model_score": [(row["step"], row["eval/mean_reward"]) for row in evaluations],
        "training_reward": [row["reward/mean"] for row in rows if "reward/mean" in row],
        "kl": [row.get("kl/mean", row.get("kl_ref")) for row in rows if "reward/mean" in row],
    }


def preferences(args: argparse.Namespace) -> dict[str, Any]:
    """Train with each loss, then compare what the policy thinks of both answers with before."""
    steps = args.steps[2]

    def train(name: str) -> float:
        data = "answers.jsonl" if name == "kto" else "pairs.jsonl"
        begun = time.monotonic()
        lockstep(
            args,
            ["train", "dpo", "--algorithm.name", name, "--data.source", args.out / "train" / data],
            ["--train.lr", LOSSES[name]],
            training(args, steps, args.out / name, args.batch * (2 if name == "kto" else 1)),
            log=args.out / f"{name}.log",
        )
        return time.monotonic() - begun

    with ThreadPoolExecutor(args.side_by_side) as pool:
        seconds = dict(zip(args.losses, pool.map(train, args.losses), strict=True))
    pairs = read(args.out / "held_out/pairs.jsonl")
    start = answer_logprobs(str(bundled_folder()), pairs, args.device)
    found: dict[str, Any] = {"steps": steps, "mean_logprob_accuracy_start": share(start, mean=True)}
    for name in args.losses:
        now = answer_logprobs(str(args.out / name / "export"), pairs, args.device)
        raised = [
            [(a - b, length) for (a, length), (b, _) in zip(n, s, strict=True)]
            for n, s in zip(now, start, strict=True)
        ]
        metrics = [row for row in read(args.out / name / "metrics.jsonl") if "loss" in row]
        found[name] = {
            "pair_accuracy": share(raised),
            "mean_logprob_accuracy": share(now, mean=True),
            "train_accuracy": [row.get("accuracy") for row in metrics],
            "loss": [row["loss"] for row in metrics],
            "seconds": round(seconds[name], 1),
        }
        found[f"{name}_accuracy"] = found[name]["pair_accuracy"]
    return found


def share(pairs: list[list[tuple[float, int]]], *, mean: bool = False) -> float:
    """Pairs whose first number is the larger one; equal ones count half.

    Args:
        pairs: (log-probability, tokens) of the chosen and of the rejected answer.
        mean: compare log-probabilities per token.
    """
    values = [[total / length if mean else total for total, length in pair] for pair in pairs]
    return sum((good > bad) + 0.5 * (good == bad) for good, bad in values) / len(values)


@torch.inference_mode()
def answer_logprobs(folder: str, pairs: list[dict[str, Any]], device: str) -> list[list[tuple[float, int]]]:
    """(sum of log-probabilities, tokens) of both answers of each pair, by transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    found = []
    for pair in pairs:
        of_pair = []
        for answer in (pair["chosen"], pair["rejected"]):
            last = [{"role": "assistant", "content": answer_text(answer)}]
            before = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True, tokenize=False)
            text = tokenizer.apply_chat_template([*pair["prompt"], *last], tokenize=False)
            prompt = tokenizer(before, add_special_tokens=False)["input_ids"]
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            logits = model(torch.tensor([ids], device=device)).logits[0, len(prompt) - 1 : -1].float()
            labels = torch.tensor(ids[len(prompt) :], device=device)
            of_pair.append((float(logits.log_softmax(-1).gather(1, labels[:, None]).sum()), len(labels)))
        found.append(of_pair)
    return found


def answer_text(answer: str | list[dict[str, str]]) -> str:
    """An answer is text, or a list of one message."""
    return answer if isinstance(answer, str) else answer[0]["content"]


def bundled_folder() -> Path:
    """The folder of the bundled model's weights."""
    from lockstep.config.model import ModelConfig
    from lockstep.models.load import model_folder

    return model_folder(ModelConfig(name=MODEL))


def problems(digits: int, counts: list[int]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Problems to train on and others, held out by their text."""
    data = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=digits, size=20 * sum(counts), seed=1
    )
    texts = {row["question"]: str(row["answer"]) for row in data}
    rows = [{"prompt": question, "answer": answer} for question, answer in texts.items()]
    if len(rows) < sum(counts):
        raise SystemExit(f"only {len(rows)} problems of {digits} digits, asked for {sum(counts)}")
    return rows[: counts[0]], rows[counts[0] : sum(counts)]


def training(args: argparse.Namespace, steps: int, run: Path, batch: int | None = None) -> list[Any]:
    """Flags that all training runs have."""
    words: list[Any] = [
        "--steps",
        steps,
        "--run-dir",
        run,
        "--train.device",
        args.device,
        "--model.dtype",
        args.dtype,
    ]
    for flag, value in COMMON.items():
        words += [flag, *([value] if isinstance(value, str) else value)]
    return [*words, *([] if batch is None else ["--batch-size", batch]), "--log.no-tensorboard"]


def lockstep(args: argparse.Namespace, *words: Iterable[Any], log: Path) -> None:
    """Run a command of lockstep, unless its log says that it has run."""
    command = [sys.executable, "-m", "lockstep", *(str(word) for part in words for word in part)]
    done = f"done: {' '.join(command[2:])}\n"
    if log.is_file() and log.read_text().endswith(done):
        return
    with log.open("w") as out:
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ).returncode
        if status:
            raise SystemExit(f"{' '.join(command[1:])} ended with {status}: {log.read_text()[-2000:]}")
        out.write(done)


def unpaired(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """KTO's rows: every answer by itself, with a label."""
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs
        for side in ("chosen", "rejected")
    ]


def evenly(pairs: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most `most` pairs, as equally many of each problem as there are."""
    by_problem: dict[str, list[dict[str, Any]]] = {}
    for row in pairs:
        by_problem.setdefault(json.dumps(row["prompt"]), []).append(row)
    kept: list[dict[str, Any]] = []
    for turn in range(max(map(len, by_problem.values()), default=0)):
        kept += [rows[turn] for rows in by_problem.values() if turn < len(rows)]
    return kept[:most]


def read(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: Iterable[Any]) -> None:
    """Write lines of JSON, unless the file has them."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def machine(device: str) -> str:
    """The GPU, or what the operating system calls the CPU."""
    return (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} CPUs"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
