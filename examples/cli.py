"""What the command lines share: bad input ends with status 2 and one line, and files are tried before the work is done."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from matplotlib.backend_bases import FigureCanvasBase


class Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    @contextmanager
    def complaining(self) -> Iterator[None]:
        """Input that turns out to be bad later on is reported in the same way. Ctrl-C is no error, and leaves no traceback either."""
        try:
            yield
        except (ValueError, OSError) as error:
            self.error(" ".join(str(error).split()))
        except KeyboardInterrupt:
            sys.stdout.flush()
            sys.stderr.write(f"{self.prog}: interrupted\n")
            sys.stderr.flush()
            os._exit(130)  # at once: taking the interpreter down while device threads still compute crashes it


def output_file(text: str) -> Path:
    """A path that can be written, for `type=`. Leaves no file behind if there was none."""
    path = Path(text)
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't write {text!r}: {error.strerror}") from error
    if not existed:
        path.unlink()
    return path


def picture_file(text: str) -> Path:
    """The same for a picture, in a format that matplotlib knows."""
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(text).suffix.removeprefix(".").lower() not in formats:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in the name of a picture format: {', '.join(formats)}")
    return output_file(text)
