"""A task set of verifiers: a word is asked for, in one turn."""

import verifiers.v1 as vf


class WordData(vf.TaskData):
    answer: str


class WordTaskConfig(vf.TaskConfig):
    broken: bool = False


class WordTask(vf.Task[WordData, vf.State, WordTaskConfig]):
    @vf.reward(weight=2.0)
    async def says(self, trace: vf.Trace) -> float:
        if self.config.broken and self.data.answer != "abc":
            raise LookupError("by design")
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def one_turn(self, trace: vf.Trace) -> float:
        return float(trace.num_turns == 1)


class WordConfig(vf.TasksetConfig):
    num_tasks: int = 3
    task: WordTaskConfig = WordTaskConfig()


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self) -> list[WordTask]:
        words = [f"word{i}" for i in range(self.config.num_tasks - 1)] + ["abc"]
        return [
            WordTask(WordData(prompt=f"Say {w}.", system_prompt="Be short.", answer=w), self.config.task)
            for w in words
        ]


__all__ = ["WordTaskset"]
