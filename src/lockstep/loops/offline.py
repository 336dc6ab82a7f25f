"""SFT, DPO and its successors, KTO, reward models. One step: pack documents, loss and backward, update.

documents ──► packs ──► (DPO: reference logprobs) ──► loss, backward ──► optimizer step
"""

from __future__ import annotations

from typing import Any, Unpack

from lockstep.config.run import OfflineRun
from lockstep.loop.documents import build_documents
from lockstep.loop.metrics import shape_metrics
from lockstep.loop.run import EvaluationResult, Run, Start


def train(config: OfflineRun, **start: Unpack[Start]) -> dict[str, Any]:
    """Train on documents; returns the run's summary. `lockstep.train_offline` checks the config first.

    Args:
        start: resume, checkpoint, restart, ranks.
    """
    with Run.open(config, **start) as run:
        task, policy, documents = build_documents(run)  # rows are checked before weights are read
        loss = task.loss()
        run.restore(policy)  # from the checkpoint to go on from, if there is one

        def evaluate(name: str, done: int) -> EvaluationResult:
            with run.spans("evaluate"):
                return EvaluationResult(numbers=task.held_out(documents.evaluation(), policy.backend))

        for step, batches in run.steps(documents, evaluate=evaluate):
            metrics = policy.update(batches, loss)
            run.log(step, metrics | shape_metrics(batches))
        return run.finish()
