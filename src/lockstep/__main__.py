"""`python -m lockstep` is the command `lockstep`."""

import sys

from lockstep.cli.main import main

sys.exit(main())
