"""What every command does about an output that cannot be written."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from io import TextIOWrapper

Main = Callable[[Sequence[str] | None], int]


def command(name: str) -> Callable[[Main], Callable[..., int]]:
    """Make ``main`` end with exit code 2 and one line when its output cannot be written.

    Characters that the output's encoding lacks are escaped.
    """

    def wrap(main: Main) -> Callable[..., int]:
        @wraps(main)
        def guarded(arguments: Sequence[str] | None = None) -> int:
            if sys.stdout is None:
                return refuse(name, "standard output is closed")
            if isinstance(sys.stdout, TextIOWrapper):  # a caller may put in another stream
                sys.stdout.reconfigure(errors="backslashreplace")
            try:
                code = main(arguments)
                sys.stdout.flush()
            except OSError as error:  # a full disk, a closed pipe
                # What is left in the buffer would be written, and fail again, at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return refuse(name, f"the output cannot be written ({error.strerror})")
            return code

        return guarded

    return wrap


def refuse(name: str, reason: str) -> int:
    """Say in one line why the command ``name`` cannot run; its exit code, 2."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"segckpt {name}: {reason}", file=sys.stderr)
    return 2
