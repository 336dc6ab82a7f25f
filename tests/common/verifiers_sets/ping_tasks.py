"""A task set of verifiers whose tool is a server of its own."""

import verifiers.v1 as vf
from ping_tools import PingTools


class PingData(vf.TaskData):
    pass


class PingTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class PingTask(vf.Task[PingData, vf.State, PingTaskConfig]):
    @classmethod
    def toolsets(cls, config: PingTaskConfig) -> list[vf.Toolset]:
        return [PingTools(config.tools)]

    @vf.reward
    async def pongs(self, trace: vf.Trace) -> float:
        return float(sum(m.role == "tool" and "pong 3" in str(m.content) for m in trace.messages))


class PingConfig(vf.TasksetConfig):
    task: PingTaskConfig = PingTaskConfig()


class PingTaskset(vf.Taskset[PingTask, PingConfig]):
    def load(self) -> list[PingTask]:
        return [PingTask(PingData(prompt=f"Ping {i}."), self.config.task) for i in range(2)]


__all__ = ["PingTaskset"]
