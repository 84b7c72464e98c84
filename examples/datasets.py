"""The data sets of the examples, from files that scripts/get-data fetches. Nothing is downloaded here.

Every file's SHA-256 is checked at each load: a damaged file is an error, never a slightly different result.
"""

import gzip
import hashlib
import importlib.util
import os
from pathlib import Path

import numpy

from mpitrain.errors import ConfigError, DataError

# A test checks that scripts/get-data has the same checksums.
_FASHION = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}
_AUSTEN = {"austen.txt": "65b434d16a8755142bfa95ba19c5f9abd0d30cf3dffe3b6793e834f9f56dcc96"}

Images = tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray]


# The cluster set-up puts data here, in the shared folder, where every node sees the data.
_BESIDE = Path(__file__).parent / "data"


def default_directory() -> Path:
    """The folder for the files of scripts/get-data: $XDG_CACHE_HOME/mpitrain, else ~/.cache/mpitrain."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpitrain"


def load_images(name: str, directory: Path | None = None) -> Images:
    """Images and their classes: train_x, train_y, test_x, test_y.

    x is float32 (n, pixels), 0 to 1; y is int64 (n,), 0 to 9.

    fashion: Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017), 60,000 + 10,000 images of 28 x 28, from
        `directory`/fashion (unless given: data/ beside this file if fashion is in it, else `default_directory()`).
    digits: scikit-learn's 1,442 + 355 images of 8 x 8, which need no file: the substitute if Fashion-MNIST is
        missing. In every class each fifth image is for testing.

    Raises DataError if a file is missing or damaged, or scikit-learn is missing; ConfigError for another name.
    """
    if name == "digits":
        return _digits()
    if name != "fashion":
        raise ConfigError(f"data is {name!r}; allowed: 'fashion', 'digits'")
    contents = [gzip.decompress(_read(name, directory, file, sha256)) for file, sha256 in _FASHION.items()]
    # The idx format: 16 bytes before the pixels, 8 before the labels. The checksum guarantees the sizes.
    train_x, train_y, test_x, test_y = (numpy.frombuffer(content, numpy.uint8) for content in contents)
    return (
        _scaled(train_x[16:].reshape(60_000, 784), 255),
        train_y[8:].astype("int64"),
        _scaled(test_x[16:].reshape(10_000, 784), 255),
        test_y[8:].astype("int64"),
    )


def standardised(train: numpy.ndarray, test: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Mean 0 and standard deviation 1 over all pixels of the training images."""
    mean, deviation = train.mean(), train.std()
    return (train - mean) / deviation, (test - mean) / deviation


def load_text(name: str, directory: Path | None = None) -> tuple[numpy.ndarray, numpy.ndarray, str]:
    """A text as characters: train_tokens, validation_tokens, vocabulary; vocabulary[token] is the character.

    Tokens are int64 (n,); the last tenth of the text is for validation.

    austen: Jane Austen's six novels, 4,025,028 characters of 81 kinds, from `directory`/austen (unless given: as
        with `load_images`), in alphabetical order of their titles.

    Raises DataError if the file is missing or damaged; ConfigError for another name.
    """
    if name != "austen":
        raise ConfigError(f"text is {name!r}; allowed: 'austen'")
    ((file, sha256),) = _AUSTEN.items()
    text = _read(name, directory, file, sha256).decode()
    vocabulary = "".join(sorted(set(text)))
    codes = numpy.frombuffer(text.encode("utf-32-le"), numpy.uint32)
    token_of = numpy.zeros(ord(vocabulary[-1]) + 1, numpy.int64)
    token_of[[ord(character) for character in vocabulary]] = numpy.arange(len(vocabulary))
    tokens = token_of[codes]
    split = len(tokens) * 9 // 10
    return tokens[:split], tokens[split:], vocabulary


def _read(name: str, directory: Path | None, file: str, sha256: str) -> bytes:
    folder = Path(directory or (_BESIDE if (_BESIDE / name).is_dir() else default_directory()))
    path = folder / name / file
    command = f"scripts/get-data {name}" + ("" if folder == default_directory() else f" {folder}")
    remedy = f"get it with: {command}" + (", or train on the substitute: --data digits" if name == "fashion" else "")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}), expected SHA-256 {sha256}; {remedy}") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise DataError(f"{path} is damaged: {len(content)} bytes with SHA-256 {digest}, expected {sha256}; {remedy}")
    return content


def _scaled(values: numpy.ndarray, largest: int) -> numpy.ndarray:
    scaled: numpy.ndarray = numpy.divide(values, largest, dtype="float32")
    return scaled


def _digits() -> Images:
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("digits come with scikit-learn, which is missing; get it with: pip install 'mpitrain[digits]'")
    # Read only scikit-learn's file: its import would take each rank a second.
    table = numpy.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    x, y = table[:, :-1], table[:, -1]
    test = numpy.zeros(len(y), bool)
    for label in range(10):
        test[numpy.flatnonzero(y == label)[4::5]] = True
    x, y = _scaled(x, 16), y.astype("int64")
    return x[~test], y[~test], x[test], y[test]
