"""``python -m simpletuner_segckpt.launch``: see ``commands.launch``."""

import sys

from .commands.launch import main

if __name__ == "__main__":
    sys.exit(main())
