"""English text that every Python has: the topics of its own documentation, `pydoc_data.topics`, byte by byte.

Topics quote each other at length, so a paragraph that comes again is left out: else a third of what is held out would have been trained on;
so it is a twelfth, phrases and variants. The text differs between releases of Python (3.11: 374 kB of 465), and so do the figures. The
models do not.
"""

import re
from pydoc_data.topics import topics

import numpy as np

from workloads import Pace, Task
from workloads.language import language_task, windows
from workloads.lstm import LSTM
from workloads.transformer import Transformer

_LENGTH = 16  # bytes of a sample
_RUN, _OF = 32, 10  # of each ten runs of so many samples in a row the last is held out

MODELS = {
    "lstm": LSTM(vocabulary=256, width=64),
    "lstm_untied": LSTM(vocabulary=256, width=64, tied=False),
    "transformer": Transformer(vocabulary=256, width=64),
}
_PACES = {  # as in the papers the LSTM has no momentum: with it a dense run learns no better, and values that are sent late overshoot
    "lstm": {"sgd": Pace(10.0, momentum=0.0), "adamw": Pace(0.005)},
    "lstm_untied": {"sgd": Pace(10.0, momentum=0.0), "adamw": Pace(0.005)},
    "transformer": {"sgd": Pace(0.3), "adamw": Pace(0.003)},
}


def read() -> np.ndarray:
    """The text, uint8 [bytes]."""
    paragraphs = (paragraph.strip("\n") for name in sorted(topics) for paragraph in re.split(r"\n\s*\n", topics[name]))
    return np.frombuffer("\n\n".join(dict.fromkeys(paragraphs)).encode(), np.uint8)


def load(model: str) -> Task:
    """The task, with a tenth of the text held out."""
    samples = windows(read(), _LENGTH)["tokens"]
    held_out = np.arange(len(samples)) // _RUN % _OF == _OF - 1
    task = language_task({"tokens": samples[~held_out]}, {"tokens": samples[held_out]}, MODELS[model], 4000, _PACES[model])
    return task._replace(batch=8)  # 1,024 bytes a step with 8 workers: many small steps learn more from a text as short as this
