"""`lockstep submit`: submit a run to a Ray cluster, where it outlives this shell.

lockstep submit run.toml --cluster http://head:8265 --run-dir /data/runs/a
lockstep submit ppo --recipe tiny-ppo --train.backend fsdp2 --cluster http://head:8265 --run-dir /data/runs/b
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.cli import arguments as values
from lockstep.cli.train import check_cluster, parse
from lockstep.config.cluster import ClusterConfig
from lockstep.errors import ConfigError
from lockstep.observe.text import echo
from lockstep.processes.programs import COMMAND

USAGE = """usage: lockstep submit RUN.toml [OPTIONS] --cluster http://HEAD:8265 --run-dir FOLDER
       lockstep submit grpo|ppo|sft|dpo|rm [OPTIONS] --cluster http://HEAD:8265 --run-dir FOLDER
       lockstep submit --resume|--restart RUN_DIR [OPTIONS] --cluster http://HEAD:8265

All options of `lockstep train` are accepted, plus these:
  --cluster URL     the dashboard of the cluster's head; RAY_AUTH_TOKEN_PATH names the file with its token
  --include PATH    a file or folder below the working directory that the run needs (repeatable); modules
                    named in settings (module:Class) are included automatically
  --follow          show the run's output until the run ends; Ctrl-C leaves it running
FOLDER is an absolute path on the cluster. To watch or stop the run, use lockstep status, logs and stop with
the same --cluster."""
_TRAIN = ("python", "-m", COMMAND, "train")


def main(argv: Sequence[str]) -> int:
    """Exit status 0: the cluster has the job; with --follow: it has finished, or Ctrl-C left it going."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        echo(USAGE)
        return 0 if argv else 2
    own, rest = _parser().parse_known_args(argv)
    if own.cluster is None:
        raise ConfigError(
            "missing-setting: submit needs --cluster http://HEAD:8265; to train without a cluster, use "
            "lockstep train"
        )
    if not rest:
        raise ConfigError(
            "missing-setting: there is nothing to submit; name a TOML file, grpo, ppo, sft, dpo, rm or "
            "--resume RUN_DIR"
        )
    command = parse(rest)
    if command.json is not None or command.print_config:
        raise ConfigError(
            "unsupported-combination: --json and --print-config only work with train; omit them"
        )
    check_cluster(command)
    again = "--restart" if command.restart else None if command.resume is None else "--resume"
    run_dir = command.run.run_dir if again is None else (command.resume or command.run.run_dir)
    run_dir = run_dir if run_dir is None or again is None else run_dir.absolute()
    if run_dir is None or not run_dir.is_absolute():
        raise ConfigError(
            f"missing-setting: run_dir = {None if run_dir is None else str(run_dir)!r}: a job runs in a "
            "temporary folder of Ray's; pass --run-dir with an absolute path that exists on the nodes"
        )
    from lockstep.cluster.jobs import RUN_FILE, Jobs, packed, placement_of
    from lockstep.cluster.launch import check_nodes

    with packed(command.run, extra=own.include) as folder:
        jobs = Jobs(own.cluster)
        check_nodes(jobs, placement_of(command.run.cluster or ClusterConfig()))
        if again is not None:
            words = [again, str(run_dir), *_without(rest, again)]
        else:
            patience = () if command.rank_timeout is None else ("--rank-timeout", str(command.rank_timeout))
            words = [RUN_FILE, *patience]
        job = jobs.submit(folder, [*_TRAIN, *words, "--cluster", "auto"], run_dir=run_dir)
    echo(f"submit: {job}, {run_dir}; see it with: lockstep logs {job} --cluster {own.cluster} --follow")
    if not own.follow:
        return 0
    try:
        for text in jobs.follow(job):
            echo(text, end="")
    except KeyboardInterrupt:
        echo(f"\nsubmit: {job} goes on; end it with: lockstep stop {job} --cluster {own.cluster}")
        return 0
    ended = jobs.find(job)
    echo(ended.text())
    return 0 if ended.state == "finished" else 1


def _without(words: Sequence[str], flag: str) -> list[str]:
    """Words without a flag and its value."""
    place = next((i for i, word in enumerate(words) if word.split("=")[0] == flag), None)
    if place is None:
        return list(words)
    return [*words[:place], *words[place + (1 if "=" in words[place] else 2) :]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep submit", add_help=False, allow_abbrev=False)
    parser.add_argument("--cluster")
    parser.add_argument("--include", type=values.path, action="append", default=[])
    parser.add_argument("--follow", action="store_true")
    return parser
