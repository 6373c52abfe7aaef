"""Peaks and step times of the published sweep beside predictions: what docs/estimator.md shows.

Without names, all examples that can be compared: some minutes. Nothing is measured here; every
figure of the sweep stands in ``sweep/published_sweep.csv``.
"""

import argparse
import sys

from sweep.page import chosen, page
from sweep.predicted import GPUS, compare_example

from simpletuner_segckpt.messages.errors import WorkloadError


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("names", nargs="*", metavar="NAME", help="parts of the names of examples")
    made.add_argument("--gpu", choices=GPUS, default=GPUS[0], help="card of the sweep")
    options = made.parse_args()
    comparisons = []
    try:
        for name in chosen(options.names):
            print(f"running {name} without memory", file=sys.stderr)
            comparisons.append(compare_example(name, options.gpu))
    except WorkloadError as error:
        made.error(str(error))
    print(page(comparisons))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
