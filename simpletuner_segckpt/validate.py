"""``python -m simpletuner_segckpt.validate``: see ``commands.validate``."""

import sys

from .commands.validate import main

if __name__ == "__main__":
    sys.exit(main())
