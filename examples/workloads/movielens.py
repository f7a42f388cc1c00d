"""MovieLens (Harper and Konstan, 2015): who rated which film, from `ratings.csv` (20M, 25M, latest) or `u.data` (100K).

A rating counts as interest, whatever it says, and each user's last one is held out, as in He et al., arXiv:1708.05031.
"""

import warnings
from pathlib import Path

import numpy as np

from workloads import Pace, Task
from workloads.files import complaint, existing
from workloads.neumf import NeuMF
from workloads.ranking import ranking_task

_HEADER = "userId,movieId,rating,timestamp"
_FORMS = {
    "ratings.csv": f"MovieLens's ratings.csv: a line {_HEADER}, then one such line for each rating",
    "u.data": "MovieLens 100K's u.data: for each rating a line with user, film, rating and timestamp, between tabs",
}
_STEPS = 5_000


def read(data: Path) -> tuple[np.ndarray, np.ndarray, int, int]:
    """The training pairs (user, film), the held-out pairs, both int32 [pairs, 2], and how many users and films there are.

    Raises:
      ValueError: for a file that is missing, damaged, truncated, or of another version.
    """
    found = next((path for name in _FORMS for path in (data / name, *sorted(data.glob(f"ml-*/{name}"))) if path.is_file()), None)
    path = found or existing(data, " or ".join(_FORMS), f"it should be {', or '.join(_FORMS.values())}")
    form = _FORMS[path.name]
    rows = _rows(path, form)
    numbers = rows[:, :2]
    if not ((numbers >= 1) & (numbers < 2**31) & (numbers == np.floor(numbers))).all():
        raise complaint(path, "has a user or a film whose number is not positive and whole, or beyond 2^31", form)
    if not np.isfinite(rows[:, 3]).all():
        raise complaint(path, "has a timestamp that is not a number", form)
    if not ((rows[:, 2] >= 0.5) & (rows[:, 2] <= 5)).all():
        raise complaint(path, "has a rating that is not in 0.5..5", form)
    (users, user), (items, item) = (np.unique(rows[:, i].astype(np.int64), return_inverse=True) for i in (0, 1))
    order = np.lexsort((rows[:, 3], user))  # a user's ratings together, the last one last
    user, item = user[order], item[order]
    last = np.append(user[1:] != user[:-1], True)
    if (np.bincount(user) < 2).any():
        raise complaint(path, "has a user with one rating: with it held out nothing is left to train on", form)
    pairs = np.stack([user, item], axis=1).astype(np.int32)
    return pairs[~last], pairs[last], len(users), len(items)


def _rows(path: Path, form: str) -> np.ndarray:
    """Users, films, ratings and timestamps, float64 [ratings, 4]."""
    with path.open("rb") as file:
        first = file.readline()
        file.seek(0, 2)
        file.seek(max(file.tell() - 1, 0))
        if file.read() != b"\n":
            raise complaint(path, "ends in the midst of a line: is it truncated?", form)
    table = path.suffix == ".csv"
    if table and first.strip() != _HEADER.encode():
        raise complaint(path, f"begins with {first[:60]!r}: is it of another version?", form)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy warns of a file without data
            rows = np.loadtxt(path, delimiter="," if table else "\t", skiprows=int(table), ndmin=2, encoding="utf-8", comments=None)
    except (ValueError, UserWarning) as error:
        raise complaint(path, f"is damaged: {error}", form) from error
    if rows.shape[1] != 4:
        raise complaint(path, f"has {rows.shape[1]} columns: is it of another version?", form)
    return rows


def load(data: Path) -> Task:
    """The task, with the model in the papers' size."""
    train, test, users, items = read(data)
    network = NeuMF(users, items, dropout=0.5)
    return ranking_task(train, test, items, network, _STEPS, {"sgd": Pace(3.0), "adamw": Pace(0.003)})
