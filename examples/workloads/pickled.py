"""Reads the pickles of CIFAR without running what is in them.

A pickle is a program: it may name any function and have it called. Here it can name three things, which numpy's arrays are made of in a
pickle, and gets harmless stand-ins for them that only keep what they are given. An array is made of that when it has been checked.
"""

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np


class _Kept:
    """Stands in for an array or a dtype: keeps how it was made and what was set."""

    def __init__(self, *made: Any) -> None:
        self.made, self.set = made, None

    def __setstate__(self, state: Any) -> None:
        self.set = state


class _Array(_Kept):
    """Set to (version, shape, dtype, whether in Fortran's order, bytes)."""


class _Dtype(_Kept):
    """Made of (name, ...)."""


class _ArrayType:
    """Stands in for the type itself, an argument of `_reconstruct`."""


_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # as numpy 2 writes it
    ("numpy", "ndarray"): _ArrayType,
    ("numpy", "dtype"): _Dtype,
}


_TUPLES = 1000  # at most; shapes are tuples, and the arguments of what makes an array


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data set needs")
        return _KNOWN[module, name]


def read_pickle(path: Path) -> dict[str, Any]:
    """A dict with strings for keys, pickled by Python 2, or by Python 3 in protocol 3 or 4; its strings are bytes, its arrays uint8.

    Raises:
      ValueError: says what is wrong with the file, as a clause without a subject.
    """
    content = path.read_bytes()
    try:
        _check_instructions(content)
        read = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises whatever its wrong instructions lead to
        raise ValueError(f"can't be read ({type(error).__name__}: {error}): is it damaged, truncated, or no pickle at all?") from error
    if not isinstance(read, dict) or not all(isinstance(key, bytes | str) for key in read):
        raise ValueError("is no pickled dict with strings for keys")
    named = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in read.items()}
    return {name: _array(value) if isinstance(value, _Array) else value for name, value in named.items()}


def _check_instructions(content: bytes) -> None:
    """Looks for what would end the process instead of raising.

    A pickle numbers what it will need again; with a number out of thin air it makes the unpickler ask for all the memory there is. And a
    tuple within a tuple, and so on, as a key overflows the stack.
    """
    tuples = 0
    for count, (instruction, argument, _) in enumerate(pickletools.genops(content)):
        if instruction.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise pickle.UnpicklingError(f"it numbers {argument} things, and has {count}")
        tuples += instruction.name.startswith("TUPLE")
        if tuples > _TUPLES:
            raise pickle.UnpicklingError(f"it has more than {_TUPLES} tuples, which no data set needs")


def _array(kept: _Array) -> np.ndarray:
    match kept.set:
        case (int(), tuple() as shape, _Dtype(made=(b"u1" | "u1", *_)), bool() | 0 | 1 as columns_first, bytes() as content):
            sizes = [size for size in shape if isinstance(size, int) and size >= 0]
            if len(sizes) == len(shape) and math.prod(sizes) == len(content):
                return np.frombuffer(content, np.uint8).reshape(sizes, order="F" if columns_first else "C")
    raise ValueError("has an array that is not one of bytes, or whose shape does not fit its length")
