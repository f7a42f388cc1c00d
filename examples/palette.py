"""One look for each method, the same in all pictures, told apart by the colour-blind too (Okabe, Ito and Tol's colours; lines, markers)."""

from typing import Any, NamedTuple


class Look(NamedTuple):
    color: str
    line: Any  # matplotlib's line style
    marker: str


_LOOKS = {
    "exdyna": Look("#D55E00", "-", "o"),
    "micro": Look("#E69F00", "-", "s"),
    "deft": Look("#009E73", "-", "^"),
    "clt_k": Look("#CC79A7", "-", "D"),
    "gtop_k": Look("#56B4E9", "-", "v"),
    "top_k": Look("#0072B2", "--", "X"),
    "sidco": Look("#7A5195", "--", "P"),
    "hard_threshold": Look("#8C8C8C", "--", "*"),
    "dense": Look("#000000", ":", "."),
    "crossover": Look("#117733", "-.", "<"),
    "hierarchical": Look("#882255", "-.", ">"),
    "sgp": Look("#332288", "-.", "h"),
}


def look(method: str) -> Look:
    """The look of a method; of one without a look of its own, that of a thin black line."""
    return _LOOKS.get(method, Look("#000000", "-.", "x"))
