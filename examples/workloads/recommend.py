"""Implicit feedback that every Python has: which words the topics of its own documentation use. A user is a topic, an item a word.

No one was ever recommended anything here: it is a matrix of topics and words, a stand-in of the same form, where nothing can be downloaded.
Like people's tastes it has popular items, faithful groups, and a long tail. It differs between releases of Python, as `pydoc_data.topics`
does.
"""

import re
from collections import Counter
from pydoc_data.topics import topics

import numpy as np

from workloads import Pace, Task
from workloads.neumf import NeuMF
from workloads.ranking import ranking_task

_RARE = 3  # a word of fewer topics than this tells nothing of other topics
_TEST_SHARE = 0.1
_SPLIT = 0  # the split is the same whatever the seed of the training


def read() -> tuple[np.ndarray, int, int]:
    """The pairs (topic, word), int32 [pairs, 2], and how many topics and words there are."""
    words = {name: set(re.findall(r"[a-z]+", topics[name].lower())) for name in sorted(topics)}
    spread = Counter(word for used in words.values() for word in used)
    number = {word: i for i, word in enumerate(sorted(word for word, count in spread.items() if count >= _RARE))}
    pairs = [(user, number[word]) for user, used in enumerate(words.values()) for word in sorted(used) if word in number]
    return np.array(pairs, np.int32), len(words), len(number)


def load() -> Task:
    """The task, with a tenth of the pairs held out."""
    pairs, users, items = read()
    held_out = np.random.default_rng(_SPLIT).random(len(pairs)) < _TEST_SHARE
    network = NeuMF(users, items, factors=4, layers=(64, 32), spread=0.1)
    return ranking_task(pairs[~held_out], pairs[held_out], items, network, 3000, {"sgd": Pace(2.0), "adamw": Pace(0.01)})
