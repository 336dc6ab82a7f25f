"""OUT/summary.json of a replay, and its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.observe.text import counted
from lockstep_lab.replay.buckets import bucketing_json
from lockstep_lab.replay.policy import weights_summary
from lockstep_lab.replay.results import ReplayRow, aggregate
from lockstep_lab.suite.machine import device_name, versions

if TYPE_CHECKING:
    from lockstep_lab.replay.replayer import Replayer

GIB = 1024**3


def summarise(
    replayer: Replayer, rows: Sequence[ReplayRow], *, seconds: float, interrupted: bool
) -> dict[str, Any]:
    """Build the whole summary; JSON values only."""
    options, report = replayer.options, replayer.watch.report()
    totals = aggregate(rows)
    summary: dict[str, Any] = {
        "recording": str(replayer.recording.path),
        "cell": options.cell.as_dict(),
        "capacity": bucketing_json(replayer.bucketing),
        "loss": options.loss,
        "backward": options.backward,
        "optimizer_step": options.optimizer_step,
        "selected": len(replayer.order),
        "seed": options.seed if options.shuffle else None,
        "notes": list(options.notes),
        "model": model_summary(replayer),
        "device": device_name(replayer.device),
        "versions": versions(),
        "weights": weights_summary(replayer.policy, replayer.matches, replayer.weights_description),
        **totals,
        "memory": memory_summary(replayer),
        "compile": {
            "graphs": report.graphs,
            "recompiles": replayer.recompiles,
            "graph_breaks": report.graph_breaks,
            "seconds": report.seconds,
            "shapes": len(totals["first_call_ms"]) if options.cell.execution != "eager" else 0,
            "reasons": list(report.reasons),
        },
        "load_seconds": replayer.load_seconds,
        "seconds": seconds,
        "interrupted": interrupted,
        "broken": replayer.broken,
        "outputs": None if replayer.outputs is None else replayer.outputs.summary(),
    }
    return summary | {"verdict": verdict(summary)}


def verdict(summary: Mapping[str, Any]) -> str:
    """The last line that a replay prints."""
    counts, selected = summary["counts"], summary["selected"]
    bad = [f"{counts[name]} {text}" for name, text in _BAD.items() if counts[name]]
    text = f"replay: {counts['ok']} of {selected} inputs replayed"
    if bad:
        text += f", {', '.join(bad)}"
    if summary["interrupted"]:
        left = selected - counts["inputs"]
        text += f"; interrupted, {left} not tried: this summary is partial"
    return f"{text}; {'the others: ' if bad and counts['ok'] else ''}{compared(summary)}"


_BAD = {
    "failed": "failed",
    "oom": "out of memory",
    "desync": "out of step",
    "skipped": "skipped after a device error or a desync",
}


def compared(summary: Mapping[str, Any]) -> str:
    """Describe in a few words how the replay compares with the recording."""
    differences, matches = summary["differences"], summary["weights"]["inputs"]
    if not differences["compared"]:
        return "nothing recorded to compare with"
    text = _distance(differences)
    model = summary["model"]
    if not model["num_layers_recorded"]:
        return f"{text} (not like with like: {model['num_layers']} of {model['num_layers_full']} layers)"
    if summary["optimizer_step"]:
        return f"{text} (weights moved: only the first input is comparable)"
    if matches["mismatch"]:
        own = differences["on_recorded_weights"]
        text += f" (NOT the recorded weights for {counted(matches['mismatch'], 'input')}"
        return f"{text}; the {own['compared']} others: {_distance(own)})" if own["compared"] else f"{text})"
    return text if not matches["unknown"] else f"{text} (whether these are its weights is unknown)"


def _distance(differences: Mapping[str, Any]) -> str:
    worst, loss = differences["logprob_max"], differences["loss_max"]
    if worst == 0.0 and loss in (0.0, None):
        return f"{'logprobs ' if loss is None else ''}equal to the recording, bit for bit"
    text = f"logprobs within {worst:.2g} nats of the recording"
    if loss is None:
        return text
    return text + (f", loss within {loss:.2g}" if loss else ", the loss bit for bit")


def model_summary(replayer: Replayer) -> dict[str, Any]:
    """The model's name and sizes, with and without --num-layers."""
    size = replayer.size
    return {
        "name": replayer.policy.config.name,
        "num_layers": size.num_layers,
        "num_layers_full": size.num_layers_full,
        "num_layers_recorded": replayer.policy.recorded_layers,
        "vocab_size": size.vocab_size,
        "max_positions": size.max_positions,
    }


def memory_summary(replayer: Replayer) -> dict[str, Any]:
    """Peaks, and parameters with and without --num-layers."""
    size = replayer.size
    return {
        "kind": replayer.memory.kind,
        "peak_bytes": replayer.memory.overall or None,
        "parameter_bytes": size.parameter_bytes,
        "parameter_bytes_full": size.parameter_bytes_full,
        "layer_reduction_factor": size.parameter_bytes / size.parameter_bytes_full,
    }


def closing(summary: Mapping[str, Any]) -> list[str]:
    """Format the summary as lines for the terminal, without the verdict."""
    totals, steady, percentiles = summary["totals"], summary["steady_ms"], summary["percentiles"]
    memory, lines = summary["memory"], []
    if summary["counts"]["ok"]:
        lines.append(
            f"{totals['documents']} documents, {totals['tokens']:,} tokens, {totals['computed_slots']:,} "
            f"computed slots in {totals['seconds']:.1f} s"
        )
    # Where every input is the first of its shape there are no others to look at.
    only_first = len(summary["first_call_ms"]) == summary["counts"]["ok"]
    without = ", all of them first calls" if only_first else ", without first calls"
    for name in ("forward", "backward"):
        spread = percentiles[f"{name}_ms"]
        if steady[name] is not None:
            lines.append(
                f"{name}: median {steady[name]:.1f} ms, p10 {spread['p10']:.1f}, p90 {spread['p90']:.1f}, "
                f"max {spread['max']:.1f}{without}"
            )
    if totals["tokens_per_second"] is not None:
        lines.append(
            f"{totals['tokens_per_second']:,.0f} tokens/s, {totals['slots_per_second']:,.0f} computed slots/s"
        )
    if memory["peak_bytes"] is not None:
        lines.append(f"memory: {memory['peak_bytes'] / GIB:.2f} GiB ({memory['kind']})")
    if memory["layer_reduction_factor"] != 1.0:
        lines.append(
            f"--num-layers: {memory['layer_reduction_factor']:.2f}x of the parameters' memory "
            f"({memory['parameter_bytes'] / GIB:.2f} of {memory['parameter_bytes_full'] / GIB:.2f} GiB)"
        )
    if summary["cell"]["execution"] != "eager":
        compiled = summary["compile"]
        lines.append(
            f"compiled: {counted(compiled['graphs'], 'graph')} for {counted(compiled['shapes'], 'shape')}, "
            f"{counted(compiled['recompiles'], 'recompile')}, "
            f"{counted(compiled['graph_breaks'], 'graph break')}, "
            f"{compiled['seconds']:.1f} s"
        )
    for kind, count in summary["errors"].items():
        lines.append(f"errors: {count} x {kind}")
    return lines
