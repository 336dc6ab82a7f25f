"""`lockstep view`: a page on this machine on which runs can be seen.

lockstep view runs/demo-20260101-120000
lockstep view runs
lockstep view runs/a runs/b --port 9000
lockstep view runs/a --export a.html
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.cli import arguments as values
from lockstep.errors import ConfigError
from lockstep.observe.text import echo

_PORT = 8765


def main(argv: Sequence[str]) -> int:
    """Run `lockstep view`. Exit status 0, also after Ctrl-C, with which a server ends."""
    parser = values.command_parser(
        "lockstep view",
        "Serve pages of runs on this machine (127.0.0.1), live while the runs train: curves, rollouts, where "
        "the time of a step goes, settings and reports. The pages open only at the printed URL. Ctrl-C stops "
        "the server.",
    )
    parser.add_argument(
        "run", type=values.path, nargs="+", metavar="RUN", help="run directories, or folders of runs"
    )
    flags = values.Flags(parser)
    flags.value("--port", values.positive, "port; if it is taken, the next free one", _PORT)
    flags.value(
        "--export", values.path, "write the pages to one HTML file, which needs no server and no network"
    )
    arguments = parser.parse_args(argv)
    if arguments.port >= 2**16:
        raise ConfigError(f"out-of-range: --port {arguments.port} is above 65535")
    if arguments.export is not None:
        from lockstep.view.export import write

        echo(write(arguments.run, arguments.export))
        return 0
    from lockstep.view.server import Server

    server = Server(arguments.run, port=arguments.port)
    if server.port != arguments.port:
        echo(f"view: port {arguments.port} is taken")
    try:
        server.run(ready=lambda: echo(f"view: {server.url}", flush=True))
    except KeyboardInterrupt:
        echo()
    return 0
