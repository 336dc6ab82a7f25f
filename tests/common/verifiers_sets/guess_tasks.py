"""A task set of verifiers with an environment of its own, which answers the policy, as TextArena's does."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    pass


class GuessTask(vf.Task[GuessData]):
    pass


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment, guesses = await interaction.turn(), []
            while not segment.terminated and len(guesses) < 2:
                guesses.append(segment.last_reply)
                if len(guesses) < 2:
                    segment = await interaction.turn(f"Not {segment.last_reply}.")
        interaction.trace.record_reward("guesses", float(len(guesses)), 1.0)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield GuessTask(GuessData(prompt=f"Guess {number}."), self.config.task)
            number += 1


__all__ = ["GuessEnv", "GuessTaskset"]
