"""The options of the bench, and those that it refuses before any rank starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from mpitrain.allreduce import ALGORITHMS
from mpitrain.errors import ConfigError
from mpitrain.forecast.bench_options import Options, add_arguments, parse_size, read_options, words_of


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def read(*words: str) -> Options:
    return read_options(parsed(*words))


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("4096", 4096), ("4K", 4096), ("64k", 65536), ("100M", 104857600), ("3G", 3 * 2**30), (" 1M ", 2**20)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0K", "-1", "4X", "K", "1.5M", "4KB", "1e6", "4 K", "²"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size; allowed are bytes such as 4096, 4K"):
        parse_size(text)


def test_defaults() -> None:
    options = read()
    assert options.operations == ("allreduce",)
    assert options.sizes_bytes == (4096, 65536, 2**20, 2**24, 100 * 2**20)
    assert (options.dtypes, options.algorithms, options.codecs) == (("float32",), ("auto",), ("none",))
    assert options.rounds is None
    assert options.link_gbit is None
    assert not options.has_all_algorithms


def test_lists_and_numbers() -> None:
    options = read(
        "--operation", "point_to_point,allreduce", "--dtypes=float64,int8", "--algorithms", "ring, native,ring"
    )
    assert options.operations == ("point_to_point", "allreduce")
    assert options.dtypes == ("float64", "int8")
    assert options.algorithms == ("ring", "native")
    options = read("--algorithms", "all", "--rounds", "7", "--seconds", "0.5", "--link-gbit", "2.5", "--sizes", "8,1K")
    assert options.algorithms == tuple(sorted(ALGORITHMS))
    assert options.has_all_algorithms
    assert (options.rounds, options.seconds, options.link_gbit, options.sizes_bytes) == (7, 0.5, 2.5, (8, 1024))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--operation", "alreduce"], "there is no operation 'alreduce'; known: allreduce, .*point_to_point"),
        (["--algorithms", "auto,rign"], "there is no algorithm 'rign'; known: auto, .*native, .*ring"),
        (["--dtypes", "complex64"], "there is no dtype 'complex64'; known: float16, float32"),
        (["--codecs", "zip"], "there is no codec 'zip'; known: none"),
        (["--codecs", "none,power_sgd"], "there is no codec 'power_sgd'; known: none"),
        (["--codecs", "top_k:2"], "the density is '2'; allowed is"),
        (["--codecs", "int8:2"], "int8 takes no setting"),
        (["--sizes", "4K,,1M"], "'' is not a size"),
        (["--sizes", "4", "--dtypes", "float32,float64"], "4 bytes is less than one element of float32,float64"),
        (["--rounds", "0"], "--rounds is '0'; it must be a whole number from 1 to 999999999"),
        (["--rounds", "2.5"], "--rounds is '2.5'; it must be a whole number from 1 to 999999999"),
        (["--seconds", "nan"], r"--seconds is 'nan'; it must be a number from 0.001 to 1e\+06"),
        (["--seconds", "inf"], "--seconds is 'inf'"),
        (["--link-gbit", "fast"], "--link-gbit is 'fast'"),
        (["--json", "/nowhere/at/all.json"], "all.json: the path is a folder, or its folder does not exist"),
        (["--save-profile", "/"], "--save-profile /: the path is a folder"),
        (["--plot", "picture.bmp"], r"must end in .png, .svg or .pdf"),
    ],
)
def test_what_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(*words)


def test_a_folder_of_another_host() -> None:
    """Rank 0 alone writes the files: `mpitrain plan --hosts` makes a folder on its own host only."""
    options = read_options(parsed("--save-profile", "/nowhere/at/all.json"), writes=False)
    assert options.save_profile == Path("/nowhere/at/all.json")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--operation point_to_point --plot r.png", "--operation point_to_point has no rows; leave out --plot"),
        ("--operation point_to_point --csv r.csv --sizes 4K", "has no rows; leave out --csv, --sizes"),
        ("--operation point_to_point --algorithms ring --codecs bf16", "leave out --algorithms, --codecs"),
        ("--operation point_to_point --dtypes int8 --rounds 3 --seconds 1", "leave out --dtypes, --rounds, --seconds"),
        ("--codecs bf16 --algorithms ring", "--algorithms ring applies to sums without .* use --codecs none,bf16"),
        ("--codecs bf16,int8 --algorithms all", "--algorithms all applies to .* use --codecs none,bf16,int8"),
        ("--operation allgather --codecs bf16", "--operation allgather includes no allreduce; leave out --codecs"),
        ("--operation broadcast,point_to_point --algorithms ring", "includes no allreduce; leave out --algorithms"),
        ("--save-profile p.json --json b.json", "--save-profile chooses what it measures; leave out --json"),
        ("--save-profile p.json --sizes 4K --link-gbit 1", "leave out --link-gbit, --sizes"),
        ("--show --json b.json", "--show measures and writes nothing; leave out --json"),
        ("--show --save-profile p.json", "--show measures and writes nothing; leave out --save-profile"),
        ("--show --algorithms ring", "leave out --algorithms"),
    ],
)
def test_what_would_be_ignored_is_refused(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(*words.split())


@pytest.mark.parametrize(
    "words",
    [
        "--codecs none,bf16 --algorithms ring",
        "--codecs bf16 --algorithms auto",
        "--operation allgather,allreduce --codecs bf16",
        "--operation allgather,point_to_point --csv r.csv --sizes 4K",
        "--operation point_to_point --json r.json --link-gbit 1 --progress",
        "--save-profile p.json --progress",
        "--show --progress",
    ],
)
def test_what_goes_together(words: str) -> None:
    read(*words.split())


def test_the_extra_is_named_where_matplotlib_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs matplotlib, which is not installed: pip install 'mpitrain\[plot\]'"):
        read("--plot", "picture.png")


def test_the_ranks_get_the_same_options(tmp_path: Path) -> None:
    words = ["--sizes", "4K", "--rounds", "2", "--json", f"{tmp_path}/a file.json", "--progress", "--link-gbit=1"]
    assert read(*words_of(parsed(*words))) == read(*words)
    assert words_of(parsed()) == []
