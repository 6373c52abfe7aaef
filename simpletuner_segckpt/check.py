"""``python -m simpletuner_segckpt.check``: see ``commands.check``."""

import sys

from .commands.check import main

if __name__ == "__main__":
    sys.exit(main())
