"""The tasks that are read from files: small files in the true formats are read right, and of all others it is said what is wrong."""

import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workloads import cifar, load_task, movielens, wikitext
from workloads.pickled import read_pickle
from workloads.ranking import unseen_items

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 3072)).astype(np.uint8)  # of each file, colour by colour
LABELS = [3, 0, 9, 9, 1, 5]


def python2(value: Any) -> bytes:
    """The instructions by which Python 2's cPickle, and numpy of that time, put down a value in protocol 2, as in the true files."""
    if isinstance(value, bytes):
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value
    if isinstance(value, int):
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(python2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(key) + python2(item) for key, item in value.items()) + b"u"
    assert isinstance(value, np.ndarray)
    made = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87R"
    kind = (
        b"cnumpy\ndtype\nq\x03"
        + python2(value.dtype.str[1:].encode())
        + b"K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    shape = b"(" + b"".join(map(python2, value.shape)) + b"t"
    return made + b"(K\x01" + shape + kind + b"\x89" + python2(value.tobytes()) + b"tb"


def batch(data: Any = IMAGES, labels: Any = LABELS, key: bytes = b"labels") -> bytes:
    """A file of CIFAR."""
    names = [f"image_{i}.png".encode() for i in range(6)]
    return b"\x80\x02" + python2({b"batch_label": b"training batch 1 of 5", key: labels, b"data": data, b"filenames": names}) + b"."


def write_cifar10(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(cifar.CIFAR10.train + cifar.CIFAR10.test):
        (folder / name).write_bytes(batch(IMAGES + np.uint8(i)))
    return folder


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-py"])
def test_cifar10(folder: str, tmp_path: Path) -> None:
    write_cifar10(tmp_path / folder)
    train, test = (cifar.read(tmp_path, cifar.CIFAR10, names) for names in (cifar.CIFAR10.train, cifar.CIFAR10.test))
    assert (train["image"].shape, train["image"].dtype) == ((30, 32, 32, 3), np.uint8)
    assert test["label"].tolist() == LABELS
    for sample, colour, row, column in ((0, 0, 0, 0), (4, 2, 7, 31)):
        assert train["image"][sample, row, column, colour] == IMAGES[sample, colour * 1024 + row * 32 + column]
        assert test["image"][sample, row, column, colour] == (int(IMAGES[sample, colour * 1024 + row * 32 + column]) + 5) % 256


def test_cifar100(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(batch(labels=[99, 0, 50, 1, 2, 3], key=b"fine_labels"))
    task = load_task("cifar100", str(tmp_path), "resnet18")
    assert task.train["label"].tolist() == task.test["label"].tolist() == [99, 0, 50, 1, 2, 3]


def test_what_python_3_and_numpy_2_write(tmp_path: Path) -> None:
    for protocol in (2, 4, 5):
        (tmp_path / "file").write_bytes(
            pickle.dumps({"labels": LABELS, "data": IMAGES.tobytes(), "n": 300}, protocol=protocol) if protocol > 2 else batch()
        )
        assert read_pickle(tmp_path / "file")["labels"] == LABELS
    for array in (IMAGES, np.asfortranarray(IMAGES)):
        (tmp_path / "file").write_bytes(pickle.dumps({"data": array}, protocol=4))
        np.testing.assert_array_equal(read_pickle(tmp_path / "file")["data"], IMAGES, strict=True)


class Hostile:
    """Runs a command wherever it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", [os.mkdir, eval, pickle.loads, np.load, np.frombuffer], ids=lambda function: function.__name__)
def test_a_hostile_file_executes_nothing(function: Callable[..., Any], protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    argument = {"eval": f"__import__('os').mkdir({str(mark)!r})", "loads": pickle.dumps(Hostile(os.mkdir, str(mark)))}
    hostile = pickle.dumps({"labels": LABELS, "data": Hostile(function, argument.get(function.__name__, str(mark)))}, protocol=protocol)
    if function in (os.mkdir, eval, pickle.loads):
        pickle.loads(hostile)  # it is one
        mark.rmdir()
    folder = write_cifar10(tmp_path / "data")
    (folder / "data_batch_3").write_bytes(hostile)
    with pytest.raises(ValueError, match=r"data_batch_3 can't be read \(UnpicklingError: it asks for .*, which no data set needs\)"):
        cifar.read(folder, cifar.CIFAR10, cifar.CIFAR10.train)
    assert not mark.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'touch executed'\ntR.",
        b"(S'touch executed'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0etouch executed\x85R.",
        b"cnumpy\ndtype.__init__.__globals__\n.",
        b"\x80\x02cnumpy\ndtype\n\x81cos\nsystem\nb.",
        b"\x80\x02\x82\x01.",
        b"P1\n.",
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x02})" + b"\x85" * 3_000_000 + b"K\x01s.",
    ],
)
def test_hostile_programs(program: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them one that would make the unpickler ask for 32 GiB, and one whose key, tuples in tuples, would overflow the stack."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(program)
    with pytest.raises(ValueError, match="can't be read"):
        read_pickle(tmp_path / "file")
    assert not (tmp_path / "executed").exists()


def test_no_damage_goes_further_than_a_complaint(tmp_path: Path) -> None:
    """Cut anywhere, or with any byte of its instructions changed: a ValueError, or what it may well be, images and labels."""
    small = batch(IMAGES[:1, :12], [3])
    path = tmp_path / "data_batch_1"
    rng = np.random.default_rng(1)
    damaged = [small[:end] for end in range(len(small))]
    for position in range(len(small)):
        changed = bytearray(small)
        changed[position] ^= int(rng.integers(1, 256))
        damaged.append(bytes(changed))
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            read = read_pickle(path)
        except ValueError:
            refused += 1
        else:
            assert all(isinstance(name, str) for name in read)
    assert refused > len(small)


BAD_CIFAR: list[tuple[bytes | None, str]] = [
    (None, r"data_batch_2 is missing: it should be one of the files data_batch_1, .* of the python version of CIFAR-10"),
    (b"", r"data_batch_2 can't be read \(.*\): is it damaged, truncated, or no pickle at all\?; it should be one of the files"),
    (batch()[:-5000], r"data_batch_2 can't be read \(.*\): is it damaged, truncated"),
    (b"\x1f\x8b" + batch(), "data_batch_2 can't be read"),
    (b"\x80\x02" + python2([1, 2]) + b".", "data_batch_2 is no pickled dict with strings for keys"),
    (
        batch(key=b"fine_labels"),
        "data_batch_2 has no 'labels', only 'batch_label', 'data', 'filenames', 'fine_labels': is it of another version",
    ),
    (batch(labels=[3, 0, 10, 9, 1, 5]), r"data_batch_2 has labels that are not in 0\.\.9"),
    (batch(labels=b"309915"), r"data_batch_2 has labels that are not in 0\.\.9"),
    (batch(labels=LABELS[:5]), "data_batch_2 has 6 images and 5 labels"),
    (batch(data=IMAGES[:0], labels=[]), "data_batch_2 has 0 images and 0 labels"),
    (batch(data=IMAGES[:, :1024]), "data_batch_2 has no 'data' of 3072 bytes for each image"),
    (batch(data=IMAGES.astype(np.float32)), "data_batch_2 has an array that is not one of bytes"),
    (batch().replace(b"M\x00\x0c", b"M\x00\x0b"), r"data_batch_2 has an array .* whose shape does not fit its length"),
]


@pytest.mark.parametrize(("content", "message"), BAD_CIFAR, ids=[message[:50] for _, message in BAD_CIFAR])
def test_bad_cifar(content: bytes | None, message: str, tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    if content is None:
        (tmp_path / "data_batch_2").unlink()
    else:
        (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_task("cifar10", str(tmp_path), "vgg16")


TRAIN_TEXT = " \n = Valkyria = \n \n The game <unk> the game , and it was \n" + " 1 @,@ 000 of them were there \n" * 8
TEST_TEXT = " \n = Homarus = \n \n The <unk> game , \n" + " it was there \n" * 10


def write_wikitext(folder: Path, train: str | bytes = TRAIN_TEXT, test: str | bytes = TEST_TEXT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("wiki.train.tokens", train), ("wiki.valid.tokens", test)):
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.mark.parametrize("folder", [".", "wikitext-2"])
def test_wikitext(folder: str, tmp_path: Path) -> None:
    write_wikitext(tmp_path / folder)
    train, test, vocabulary = wikitext.read(tmp_path)
    lines = TRAIN_TEXT.removesuffix("\n").split("\n")
    words = " <eos> ".join([*lines, ""]).split()
    assert train.size == len(words)
    assert vocabulary == len(set(words)) == train.max() + 1
    number = dict(zip(words, train.tolist(), strict=True))
    assert all(number[word] == token for word, token in zip(words, train.tolist(), strict=True))
    heard = " <eos> ".join([*TEST_TEXT.removesuffix("\n").split("\n"), ""]).split()
    assert test.tolist() == [number.get(word, number["<unk>"]) for word in heard]
    assert "Homarus" not in number


BAD_TEXT: list[tuple[dict[str, str | bytes], str]] = [
    (
        {"train": TRAIN_TEXT.replace("<unk>", "bold")},
        "wiki.train.tokens has no <unk>: is it of the raw version?; it should be UTF-8 text of",
    ),
    ({"train": TRAIN_TEXT[:-3]}, "wiki.train.tokens ends in the midst of a line: is it truncated?"),
    ({"test": TEST_TEXT.encode() + b"\xff\xfe\n"}, "wiki.valid.tokens is damaged: 'utf-8' codec can't decode byte 0xff"),
    ({"test": " few words \n"}, "wiki.valid.tokens has 3 words, too few for one sample of 31"),
    ({"test": ""}, "wiki.valid.tokens ends in the midst of a line"),
    (
        {"train": TRAIN_TEXT + " ".join(f"w{i}" for i in range(40_000)) + "\n"},
        "wiki.train.tokens has 40018 different words, more than WikiText-2: is it of WikiText-103?",
    ),
]


@pytest.mark.parametrize(("texts", "message"), BAD_TEXT, ids=[message[:40] for _, message in BAD_TEXT])
@pytest.mark.parametrize("folder", ["", "wikitext-2/"])
def test_bad_wikitext(folder: str, texts: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_wikitext(tmp_path / folder, **texts)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/{folder}{message}")):
        load_task("wikitext2", str(tmp_path))


def test_missing_text(tmp_path: Path) -> None:
    write_wikitext(tmp_path)
    (tmp_path / "wiki.valid.tokens").rename(tmp_path / "wiki.valid.raw")
    with pytest.raises(ValueError, match=r"wiki\.valid\.tokens is missing: it should be UTF-8 text of WikiText-2's word-level version"):
        load_task("wikitext2", str(tmp_path))


def ratings(form: str) -> str:
    """Five users, the first of whom rated film 7 last, of films 3, 6, ..., 450, and a sixth who has seen little."""
    rng = np.random.default_rng(2)
    lines = [(1, 7, 4, 999_999)]
    lines += [
        (user, 3 * film, 3.5 if form == "ratings.csv" else 3, 1000 * user + int(rng.integers(900)))
        for user in range(1, 6)
        for film in range(user, 151, 5)
    ]
    lines += [(600, 3, 1, 20), (600, 6, 5, 10)]
    if form == "ratings.csv":
        return "userId,movieId,rating,timestamp\n" + "".join(",".join(map(str, line)) + "\n" for line in lines)
    return "".join("\t".join(map(str, line)) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("form", "folder"), [("ratings.csv", "."), ("u.data", "."), ("ratings.csv", "ml-latest-small"), ("u.data", "ml-100k")]
)
def test_movielens(form: str, folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / form).write_text(ratings(form))
    train, test, users, items = movielens.read(tmp_path)
    assert (users, items, len(train), len(test)) == (6, 151, 147, 6)
    assert test[:, 0].tolist() == list(range(6))
    assert (test[0].tolist(), test[5].tolist()) == ([0, 2], [5, 0])  # films 3, 6, 7, ... are 0, 1, 2, ...
    assert train[-1].tolist() == [5, 1]
    task = load_task("movielens", str(tmp_path))
    assert task.test["items"].shape == (6, 100)
    seen = {tuple(pair) for pair in np.concatenate([train, test]).tolist()}
    for user, offered in zip(task.test["user"].tolist(), task.test["items"].tolist(), strict=True):
        assert (user, offered[0]) in seen
        assert len(set(offered)) == 100
        assert not seen & {(user, item) for item in offered[1:]}


def test_too_few_items_to_rank_against() -> None:
    seen = np.array([[0, item] for item in range(30)] + [[1, 0]])
    assert sorted(unseen_items(seen, np.array([0]), 129, np.random.default_rng(0))[0].tolist()) == list(range(30, 129))
    with pytest.raises(ValueError, match="there are 128 items and a user was seen with 30 of them: fewer than 99 are left"):
        unseen_items(seen, np.array([1]), 128, np.random.default_rng(0))


CSV = ratings("ratings.csv")
BAD_RATINGS: list[tuple[str, str, str]] = [
    ("ratings.csv", CSV[:-3], "ratings.csv ends in the midst of a line: is it truncated?; it should be MovieLens's ratings.csv"),
    ("ratings.csv", CSV.split("\n", 1)[1], "ratings.csv begins with b'1,7,4,999999\\n': is it of another version?"),
    (
        "ratings.csv",
        CSV.replace("3,6,3.5", "3,six,3.5").replace("1,18,3.5", "1,six,3.5"),
        "ratings.csv is damaged: could not convert string 'six'",
    ),
    ("ratings.csv", CSV + "7,8\n", "ratings.csv is damaged: the number of columns changed from 4 to 2"),
    ("ratings.csv", CSV + "7,8,9,10\n", "ratings.csv has a rating that is not in 0.5..5"),
    ("ratings.csv", CSV + "7,8,nan,10\n", "ratings.csv has a rating that is not in 0.5..5"),
    ("ratings.csv", CSV + "0,8,3,10\n", "ratings.csv has a user or a film whose number is not positive and whole"),
    ("ratings.csv", CSV + "inf,8,3,10\n", "ratings.csv has a user or a film whose number is not positive and whole, or beyond 2^31"),
    (
        "ratings.csv",
        CSV + "9007199254740993,8,3,10\n",
        "ratings.csv has a user or a film whose number is not positive and whole, or beyond",
    ),
    ("ratings.csv", CSV + "7,8,3,nan\n", "ratings.csv has a timestamp that is not a number"),
    ("ratings.csv", CSV + "# 7,8,3,10\n", "ratings.csv is damaged: could not convert string '# 7'"),
    ("ratings.csv", CSV + "7,8,3,10\n", "ratings.csv has a user with one rating"),
    ("ratings.csv", "userId,movieId,rating,timestamp\n", "ratings.csv is damaged: loadtxt: input contained no data"),
    ("u.data", "1\t2\t3\n1\t3\t3\n", "u.data has 3 columns: is it of another version?"),
    ("u.data", "1::2::3::4\n", "u.data is damaged: could not convert string '1::2::3::4'"),
    ("u.data", "", "u.data ends in the midst of a line"),
    ("ratings.dat", "1::2::3::4\n", "ratings.csv or u.data is missing: it should be MovieLens's ratings.csv: a line userId,movieId"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_RATINGS, ids=[message[:50] for _, _, message in BAD_RATINGS])
def test_bad_ratings(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_task("movielens", str(tmp_path))


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere' is not a directory"):
        load_task("movielens", str(tmp_path / "nowhere"))
