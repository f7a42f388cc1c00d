"""WikiText-2 (Merity et al., arXiv:1609.07843): two million words of Wikipedia, from the word-level files of the data set."""

from pathlib import Path

import numpy as np

from workloads import Pace, Task
from workloads.files import complaint, existing
from workloads.language import language_task, windows
from workloads.lstm import LSTM
from workloads.transformer import Transformer

_LENGTH = 30  # words of a sample, as the papers' truncated backpropagation has it
_FOLDER = "wikitext-2"
_TRAIN, _TEST = "wiki.train.tokens", "wiki.valid.tokens"  # the papers report the validation part
_UNKNOWN, _END = "<unk>", "<eos>"
_MOST = 40_000  # different words; WikiText-2 has 33,278, WikiText-103, whose files have the same names, 267,735
_FORM = "UTF-8 text of WikiText-2's word-level version (wikitext-2-v1): words between blanks, rare ones replaced by <unk>"
_STEPS = 20_000


def read(data: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """The words of the training and of the held-out part as int32 [words], and how many different ones there are.

    Raises:
      ValueError: for a file that is missing, damaged, truncated, or of another version.
    """
    path, held_out_path = (existing(data, name, f"it should be {_FORM}", _FOLDER) for name in (_TRAIN, _TEST))
    train, test = _words(path), _words(held_out_path)
    number: dict[str, int] = {}
    for word in train:
        number.setdefault(word, len(number))
    if _UNKNOWN not in number:
        raise complaint(path, f"has no {_UNKNOWN}: is it of the raw version?", _FORM)
    if len(number) > _MOST:
        raise complaint(path, f"has {len(number)} different words, more than WikiText-2: is it of WikiText-103?", _FORM)
    seen, held_out = (np.array([number.get(word, number[_UNKNOWN]) for word in words], np.int32) for words in (train, test))
    return seen, held_out, len(number)


def _words(path: Path) -> list[str]:
    """The words of a file, with one for the end of each line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise complaint(path, f"is damaged: {error}", _FORM) from error
    if not text.endswith("\n"):
        raise complaint(path, "ends in the midst of a line: is it truncated?", _FORM)
    words = [word for line in text[:-1].split("\n") for word in (*line.split(), _END)]
    if len(words) <= _LENGTH:
        raise complaint(path, f"has {len(words)} words, too few for one sample of {_LENGTH + 1}", _FORM)
    return words


def load(data: Path, model: str) -> Task:
    """The task, with the models in the papers' size, and a transformer of about the same."""
    train, test, vocabulary = read(data)
    recurrent = {"sgd": Pace(10.0, momentum=0.0), "adamw": Pace(0.002)}
    network, paces = {
        "lstm": (LSTM(vocabulary, 650, dropout=0.4), recurrent),
        "lstm_untied": (LSTM(vocabulary, 650, tied=False, dropout=0.4), recurrent),
        "transformer": (Transformer(vocabulary, 512, layers=4, heads=8, dropout=0.2), {"sgd": Pace(0.3), "adamw": Pace(0.0005)}),
    }[model]
    return language_task(windows(train, _LENGTH), windows(test, _LENGTH), network, _STEPS, paces)
