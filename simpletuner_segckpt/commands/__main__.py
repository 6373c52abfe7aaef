"""``python -m simpletuner_segckpt.commands``: what the script ``segckpt`` runs."""

import sys

from . import main

sys.exit(main())
