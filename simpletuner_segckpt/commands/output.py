"""What every command does where its output cannot be written, or a file not be read."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from io import TextIOWrapper
from typing import Any, ParamSpec

from ..messages.errors import reason_of
from ..messages.findings import printable

Options = ParamSpec("Options")


class OutputError(OSError):
    """Standard output cannot be written."""


class _Output:
    """A stream like ``stream``, whose errors of writing are ``OutputError``."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _named():
            written: int = self._stream.write(text)
            return written

    def flush(self) -> None:
        with _named():
            self._stream.flush()

    def reconfigure(self, **options: Any) -> None:
        with _named():  # it flushes
            self._stream.reconfigure(**options)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(*error.args) from error


def command(name: str) -> Callable[[Callable[Options, int]], Callable[Options, int]]:
    """Make what runs a command end with a line and exit code 2 where the system refuses something.

    That is to write the output, or a file that the command itself did not look after.
    """

    def wrap(run: Callable[Options, int]) -> Callable[Options, int]:
        @wraps(run)
        def guarded(*args: Options.args, **kwargs: Options.kwargs) -> int:
            if sys.stdout is None:
                return refuse(name, "standard output is closed")
            try:
                with _written(sys.stdout):
                    return run(*args, **kwargs)
            except OutputError as error:  # a full disk, a closed pipe
                return refuse(name, f"the output cannot be written ({reason_of(error)})")
            except OSError as error:
                what = f"{error.filename}: " if error.filename else ""
                return refuse(name, f"{what}{reason_of(error)}")

        return guarded

    return wrap


@contextlib.contextmanager
def _written(stream: Any) -> Iterator[None]:
    """Within this, standard output raises ``OutputError``, at the end at the latest.

    Characters that its encoding lacks are escaped. Afterwards ``stream`` is what it was, without
    what it could not write.
    """
    output: Any = _Output(stream)
    errors = stream.errors if isinstance(stream, TextIOWrapper) else None  # callers have others
    try:
        if errors is not None:
            output.reconfigure(errors="backslashreplace")
        with contextlib.redirect_stdout(output):
            try:
                yield
            except SystemExit:  # of --help
                output.flush()
                raise
            output.flush()
    except OutputError:
        _drop(stream)
        raise
    finally:
        if errors is not None:
            with contextlib.suppress(OSError):
                stream.reconfigure(errors=errors)


def _drop(stream: Any) -> None:
    """Let go of what ``stream`` holds: it would be written, and fail again, at exit."""
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as undo:
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        undo.callback(os.close, nowhere)
        real = os.dup(descriptor)
        undo.callback(os.close, real)
        undo.callback(os.dup2, real, descriptor, os.get_inheritable(descriptor))
        os.dup2(nowhere, descriptor)
        stream.flush()


def refuse(name: str, reason: str) -> int:
    """Say in one line why the command ``name`` cannot run; its exit code, 2."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(printable(f"segckpt {name}: {reason}"), file=sys.stderr)
    return 2
