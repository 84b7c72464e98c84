import gzip
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import datasets
from jobs import HANG_SECONDS
from mpitrain.errors import ConfigError, DataError

GET_DATA = Path(__file__).parents[2] / "scripts" / "get-data"


def needs(name: str) -> pytest.MarkDecorator:
    folder = datasets.default_directory() / name
    return pytest.mark.skipif(not folder.is_dir(), reason=f"no {folder}; get it with: scripts/get-data {name}")


@pytest.fixture
def fashion(tmp_path, monkeypatch):
    """A folder that holds a tiny Fashion-MNIST: right names and right checksums, other content."""
    folder = tmp_path / "fashion"
    folder.mkdir()
    checksums = {}
    for file in datasets._FASHION:
        content = gzip.compress(b"not the real " + file.encode())
        (folder / file).write_bytes(content)
        checksums[file] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(datasets, "_FASHION", checksums)
    return folder


def error_of(directory: Path) -> str:
    with pytest.raises(DataError) as caught:
        datasets.load_images("fashion", directory)
    return str(caught.value)


def test_a_missing_directory(tmp_path):
    file, sha256 = next(iter(datasets._FASHION.items()))
    assert error_of(tmp_path / "none") == (
        f"{tmp_path}/none/fashion/{file} cannot be read (No such file or directory), expected SHA-256 {sha256}; "
        f"get it with: scripts/get-data fashion {tmp_path}/none, or train on the substitute: --data digits"
    )
    with pytest.raises(
        DataError, match=rf"{tmp_path}/austen/austen.txt cannot .*: scripts/get-data austen {tmp_path}$"
    ):
        datasets.load_text("austen", tmp_path)


def test_the_default_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert datasets.default_directory() == tmp_path / "mpitrain"
    with pytest.raises(DataError, match=r"get it with: scripts/get-data fashion, or"):
        datasets.load_images("fashion")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert datasets.default_directory() == tmp_path / ".cache" / "mpitrain"


@pytest.mark.parametrize("file", datasets._FASHION)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_file(fashion, file, damage):
    path = fashion / file
    content = path.read_bytes()
    flipped = bytes([*content[:-1], content[-1] ^ 1])
    path.write_bytes({"truncated": content[:-1], "flipped": flipped, "empty": b""}[damage])
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert error_of(fashion.parent) == (
        f"{path} is damaged: {path.stat().st_size} bytes with SHA-256 {found}, expected {datasets._FASHION[file]}; "
        f"get it with: scripts/get-data fashion {fashion.parent}, or train on the substitute: --data digits"
    )


def test_digits():
    """scikit-learn's own, divided: every image and its class once."""
    train_x, train_y, test_x, test_y = datasets.load_images("digits")
    x, y = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    expected = numpy.column_stack((x / 16, y)).astype("float32")
    found = numpy.vstack((numpy.column_stack((train_x, train_y)), numpy.column_stack((test_x, test_y))))
    assert sorted(map(bytes, found.astype("float32"))) == sorted(map(bytes, expected))
    assert (train_x.shape, test_x.shape) == ((1442, 64), (355, 64))
    assert (train_y.shape, test_y.shape) == ((1442,), (355,))
    assert {train_x.dtype.name, test_x.dtype.name} == {"float32"}
    assert {train_y.dtype.name, test_y.dtype.name} == {"int64"}
    assert (train_x.min(), train_x.max()) == (0.0, 1.0)
    in_test, in_all = numpy.bincount(test_y), numpy.bincount(test_y) + numpy.bincount(train_y)
    assert abs(in_test - in_all / 5).max() < 1
    again = datasets.load_images("digits")
    assert all((a == b).all() for a, b in zip(again, (train_x, train_y, test_x, test_y), strict=True))


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(DataError, match=r"get it with: pip install 'mpitrain\[digits\]'"):
        datasets.load_images("digits")


def test_unknown_names():
    with pytest.raises(ConfigError, match="data is 'mnist'; allowed: 'fashion', 'digits'"):
        datasets.load_images("mnist")
    with pytest.raises(ConfigError, match="text is 'fashion'; allowed: 'austen'"):
        datasets.load_text("fashion")


@needs("fashion")
def test_fashion():
    train_x, train_y, test_x, test_y = datasets.load_images("fashion")
    assert (train_x.shape, test_x.shape) == ((60_000, 784), (10_000, 784))
    assert {train_x.dtype.name, test_x.dtype.name} == {"float32"}
    assert {train_y.dtype.name, test_y.dtype.name} == {"int64"}
    assert (train_x.min(), train_x.max()) == (0.0, 1.0)
    assert train_x.mean() == pytest.approx(0.2860, abs=1e-4)  # the value that everybody normalises by
    assert numpy.bincount(train_y).tolist() == [6000] * 10
    assert numpy.bincount(test_y).tolist() == [1000] * 10


@needs("austen")
def test_austen():
    train, validation, vocabulary = datasets.load_text("austen")
    assert (train.dtype, validation.dtype) == (numpy.int64, numpy.int64)
    assert (len(train), len(validation), len(vocabulary)) == (3_622_525, 402_503, 81)
    assert vocabulary == "".join(sorted(vocabulary))
    assert "".join(vocabulary[token] for token in train[:4]) == "EMMA"
    text = "".join(vocabulary[token] for token in validation)
    assert text.endswith("\n")
    assert "Marianne" in text


def test_script_and_loader_agree_on_the_checksums():
    script = GET_DATA.read_text()
    known = {file: sha256 for sha256, file in re.findall(r"\b([0-9a-f]{64})  ([\w.-]+)", script)}
    assert known == datasets._FASHION | datasets._AUSTEN


def get_data(*arguments, path=None) -> subprocess.CompletedProcess:
    environment = {"PATH": path or "/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(
        ["/bin/bash", GET_DATA, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def test_get_data_shows_its_usage():
    assert get_data("--help").returncode == 0
    for arguments in ([], ["mnist"]):
        shown = get_data(*arguments)
        assert (shown.returncode, shown.stdout) == (2, "")
        assert shown.stderr.startswith("usage: scripts/get-data NAME [DIRECTORY]")


@needs("austen")
def test_get_data_does_nothing_when_complete(tmp_path):
    shutil.copytree(datasets.default_directory() / "austen", tmp_path / "austen")
    # Leave apt-get out of its path, so that it cannot install anything.
    shown = get_data("austen", tmp_path, path=tools(tmp_path / "bin", "sha256sum"))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == f"get-data: austen is complete in {tmp_path}/austen\n"


def tools(folder: Path, *names: str) -> str:
    """A PATH with these programs and no others."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


USED = ["sha256sum", "mkdir", "mktemp", "rm", "rmdir", "cat", "cp", "mv", "python3"]


def test_get_data_without_apt_leaves_nothing(tmp_path):
    target = tmp_path / "data"
    shown = get_data("austen", target, path=tools(tmp_path / "bin", *USED))
    assert shown.returncode == 1
    assert "apt-get and dpkg are missing: this is not Debian or Ubuntu" in shown.stderr
    assert not (target / "austen").exists()


def test_get_data_that_cannot_download_keeps_what_was_there(tmp_path):
    bin_folder = tmp_path / "bin"
    path = tools(bin_folder, *USED)
    for name in ("apt-get", "dpkg"):
        (bin_folder / name).write_text("#!/bin/sh\necho no network\nexit 100\n")
        (bin_folder / name).chmod(0o755)
    (bin_folder / "sh").symlink_to("/bin/sh")
    damaged = tmp_path / "austen" / "austen.txt"
    damaged.parent.mkdir()
    damaged.write_text("half")
    shown = get_data("austen", tmp_path, path=path)
    assert shown.returncode == 1
    assert "no network" in shown.stderr
    assert "could not download r-cran-janeaustenr" in shown.stderr
    assert [entry.name for entry in damaged.parent.iterdir()] == ["austen.txt"]
    assert damaged.read_text() == "half"
