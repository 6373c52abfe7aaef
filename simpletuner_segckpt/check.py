"""``python -m simpletuner_segckpt.check``: see ``commands.check``."""

import sys

from .commands import run

if __name__ == "__main__":
    sys.exit(run("check", sys.argv[1:]))
