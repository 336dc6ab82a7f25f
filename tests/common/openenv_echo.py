"""Games on the server of OpenEnv's template."""

import os

from lockstep.environments.openenv_game import OpenEnvGame


class Echo(OpenEnvGame):
    url = os.environ.get("ECHO_URL", "http://127.0.0.1:9")
    action = "message"
    observation = "echoed_message"


class Json(OpenEnvGame):
    url = Echo.url


class Unnamed(OpenEnvGame):
    pass
