"""CSV files: their format is detected, and errors name file, line and column."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import failing, finished
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

from hvdtrain.data import csv_rows, tabular
from hvdtrain.system.exits import BAD_DATA, CANNOT_WRITE

ROWS = "1.5,2,a\n2.5,3,b\n3.5,4,a\n"
FORMS = {
    "commas": (ROWS, ",", ".", None),
    "header": ("x,y,class\n" + ROWS, ",", ".", ("x", "y", "class")),
    "decimal commas": (ROWS.replace(",", ";").replace(".", ","), ";", ",", None),
    "decimal commas and a header": (
        ("x;y;class\n" + ROWS.replace(",", ";")).replace(".", ","),
        ";",
        ",",
        ("x", "y", "class"),
    ),
    "tabs, decimal commas": (ROWS.replace(",", "\t").replace(".", ","), "\t", ",", None),
    "spaces, decimal commas": (ROWS.replace(",", " ").replace(".", ","), " ", ",", None),
    "commas and spaces": (ROWS.replace(",", ", "), ",", ".", None),
    "pandas' index": (",x,y,class\n0,1.5,2,a\n1,2.5,3,b\n2,3.5,4,a\n", ",", ".", ("x", "y", "class")),
    "pandas' index, read and written again": (
        ",Unnamed: 0,0,1,2\nm,0,1.5,2,a\nn,1,2.5,3,b\no,2,3.5,4,a\n",
        ",",
        ".",
        ("0", "1", "2"),
    ),
    "Excel": (
        "sep=;\r\nResults of June;;\r\n\r\nx;y;class;\r\n1,5;2;a;\r\n2,5;3;b\r\n3,5;4;a;;\r\n;;;\r\n",
        ";",
        ",",
        ("x", "y", "class"),
    ),
    "Excel for Mac": ("x;y;class\r1,5;2;a\r2,5;3;b\r3,5;4;a\r", ";", ",", ("x", "y", "class")),
    "empty columns, no header": ("1.5|2|a||\n2.5|3|b||\n3.5|4|a||\n", "|", ".", None),
    "byte order mark": ("\ufeff" + ROWS, ",", ".", None),
    "CRLF, no end of the last line, empty lines": (ROWS.strip().replace("\n", "\r\n\r\n"), ",", ".", None),
    "quotes": (
        '"x 1",y,"the, class"\n' + ROWS.replace("a", '"a"').replace("2.5", '"2.5"'),
        ",",
        ".",
        ("x 1", "y", "the, class"),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_format_of_a_file_is_detected(name: str, tmp_path: Path) -> None:
    text, separator, decimal, names = FORMS[name]
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    form = csv_rows.detect(path)
    assert (form.separator, form.decimal, form.columns, form.names) == (separator, decimal, 3, names)
    (block,) = csv_rows.rows(path, form, "refuse")
    assert block.features.tolist() == [[1.5, 2], [2.5, 3], [3.5, 4]]
    assert block.classes == ["a", "b", "a"]
    lines = text.lstrip("\ufeff").splitlines()
    assert [re.findall(r"[123][.,]5", lines[line - 1]) != [] for line in block.lines] == [True] * 3
    assert ("comma" in str(form).partition(", ")[2]) == (decimal == ",")
    assert ("left out" in str(form)) == ("index" in name or name == "Excel")


@pytest.mark.parametrize(
    ("text", "is_header"),
    [
        ("0,1,2,label\n1.5,2,3,a\n2.5,3,4,b\n", True),
        ("0,1,2\n1.5,2,0\n2.5,3,1\n", True),  # an array with its class
        ("0,1,2,3\n1.5,2,3,3\n2.5,3,4,1\n", True),  # the class 3 occurs, but no row would be so regular
        ("0,1,area,label\n2,3,4,b\n2,3,5,a\n", True),
        ("400,402.5,kind\n1,2,0\n3,4,1\n", True),
        ("400.5,401,401.5,species\n1,2,3,oak\n3,4,5,elm\n5,6,7,oak\n", True),
        ("400.5,401,outcome\n1,2,True\n3,4,False\n", True),
        ("5.1,3.5,setosa\n5.2,3.4,virginica\n5.1,3.3,setosa\n", False),
        ("5.1,3.5,setosa\n" + "5.2,3.4,virginica\n" * 2000 + "5.1,3.3,setosa\n", False),  # far below
        ("5.1,5.1,setosa\n5.2,3.4,virginica\n", False),  # two columns have different names
        ("5.1,3.5,label\n5.2,3.4,label\n", False),
        ("0,1,1\n0,0,0\n1,0,1\n1,1,0\n", False),
        ("0,1,b\n0,0,a\n1,0,b\n", False),
        ("0,1,a\n", False),
        (",3.5,a\n1,2,b\n3,2,a\n", False),  # a missing value, not an index
        (",,a\n1,2,b\n", False),
    ],
)
def test_a_first_line_with_numbers_is_a_header_only_if_it_cannot_be_a_row(
    text: str, is_header: bool, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    form = csv_rows.detect(path)
    assert (form.first == 2) == is_header == (form.names is not None)
    assert form.skipped == 0
    last = text.partition("\n")[0].rpartition(",")[2]
    assert csv_rows.detect(path, known=[last]).first == (2 if text.startswith("0,1,2,3\n") else 1), "a row to predict"


def test_a_compressed_file_and_booleans_are_read_as_the_plain_file(tmp_path: Path) -> None:
    plain = tmp_path / "t.csv"
    plain.write_text("size,red,kind\n" + "1.5,1,a\n2,0,b\n" * 40)
    written = "size,red,kind\n" + "1.5,True,a\n2,False,b\n" * 40
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(written.encode()))
    expected, found = tabular.load(str(plain)), tabular.load(str(tmp_path / "t.csv.gz"))
    assert found.fingerprint == expected.fingerprint and found.columns.names == ("size", "red")


MANY = "1,2,a\n" * 400_000  # more than a block
BAD = {
    "ragged": ("1,2,a\n1,2,3,b\n", "2: 4 fields, but the first line has 3"),
    "ragged, in a later block": (MANY + "1,b\n", "400001: 2 fields"),
    "text in the first row": ("1,high,b\n2,3,a\n2,3,b\n", "1:2: high is not a number"),
    "after an index": (",x,class\n0,1,a\n1,,b\n", "3:2: the value is missing"),
    "a strange separator": ("sep=^\na^b\n", "1: the separator '^' is unknown"),
    "missing": ("1,2,a\n1,,b\n", "2:2: the value is missing; hint: fill it in, or train with --missing mean or drop"),
    "the class is missing": ("1,2,a\n1,2,\n", "2:3: the class is missing"),
    "text": ("1,2,a\n1,2,b\n1,high,b\n", "3:2: high is not a number"),
    "a thousands point": ("0,5;7,25;a\n" * 2 + "1.234;0,5;b\n", "3:1: 1.234 is not a number"),
    "beyond float64": ("1,2,a\n1,1e999,b\n", "2:2: 1e999 is larger than"),
    "one class": ("1,2,a\n2,2,a\n", "only one class, 'a'"),
    "too many classes": ("".join(f"1,{n}.5\n" for n in range(300)), "more than 256 classes"),
    "a class too rare": ("1,a\n" * 20 + "".join(f"1,b{n}\n" for n in range(9)), "none of them in the training part"),
    "one column": ("a\nb\n", "one column"),
    "duplicate header": ("x,x,class\n1,2,a\n", "1:2: two columns are named 'x'"),
    "empty": ("", "empty"),
    "binary": (b"PK\x03\x04\x00\x00", "binary or in UTF-16"),
    "Latin-1": ("1,2,a\n1,2,caf\u00e9\n".encode("latin-1"), "2: byte 0xe9 is not UTF-8"),
    "label first": ("Label,p0,p1\n" + "5,0,0\n4,0,1\n" * 20, "1:1: the column 'label' is not the last one, so 'p1'"),
    "target in the middle": ("x,target,y\n" + "5,0,0\n4,0,1\n" * 20, "1:2: the column 'target' is not the last"),
    "cut gzip": (gzip.compress(ROWS.encode() * 99)[:-20], "hint: copy the file again"),
    "quotes": ('1,2,a\n1,"2,b\n', "2: unbalanced quotes"),
    "a million columns": ("1," * 1_000_000 + "a\n", "1: 1,000,001 columns, more than the limit of 100,000"),
    "a line without an end": ("1" * (17 << 20), "1: the line is longer than 16 MiB"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_one_line_with_their_place(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    path = tmp_path / "t.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with failing(BAD_DATA) as error:
        tabular.load(str(path))
    assert str(error.value).startswith(f"{path}:") and message in str(error.value)


@pytest.mark.parametrize("text", ["x\n1.5\n2.5\n", "1.5,?\n2.5,\n"])
def test_features_are_read_without_the_class(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    (block,) = csv_rows.rows(path, csv_rows.detect(path), "drop", features=1)
    assert block.features.tolist() == [[1.5], [2.5]]
    assert block.classes == ["", ""]


def test_missing_values_become_the_training_mean_or_their_rows_are_dropped(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    values = draw.normal(5, 2, (200, 3)).round(3)
    path = tmp_path / "t.csv"
    lines = [[*map(str, row), "ab"[int(row[0] > 5)]] for row in values]
    for row in range(0, 200, 10):
        lines[row][1] = ["", "NA", "?", "NaN"][row // 10 % 4]
    path.write_text("\n".join(map(",".join, lines)))
    table = tabular.load(str(path), "mean")
    gone = np.isin(table.train.rows, np.arange(0, 200, 10))
    (x, _) = table.train.batch(np.arange(len(table.train)), np.arange(len(table.train)), None).arrays
    assert gone.any()
    assert not x[gone, 1].any()
    known = values[table.train.rows[~gone], 1]
    assert table.columns.mean[1] == pytest.approx(known.mean())
    assert table.columns.scale[1] == pytest.approx(known.std())
    dropped = tabular.load(str(path), "drop")
    assert len(table.train.features) == 200
    assert len(dropped.train.features) == 180
    assert len({table.fingerprint, dropped.fingerprint}) == 2


def test_the_default_equals_scikit_learns_data_and_scaling() -> None:
    known, table = load_breast_cancer(), tabular.load("breast-cancer")
    assert table.columns.classes == ("benign", "malignant")
    np.testing.assert_array_equal(table.train.features, known.data)
    np.testing.assert_array_equal(table.train.labels == 1, known.target_names[known.target] == "malignant")
    parts = [table.train, table.validation, table.test]
    assert sorted(np.concatenate([part.rows for part in parts])) == list(range(569))
    assert all(abs(table.train.labels[part.rows].mean() - 212 / 569) < 0.01 for part in parts), "stratified"
    scaler = StandardScaler().fit(known.data[table.train.rows])
    for part in parts:
        x, labels = part.batch(np.arange(len(part)), np.arange(len(part)), None).arrays
        np.testing.assert_allclose(x, scaler.transform(known.data[part.rows]), rtol=1e-5, atol=1e-6)
        assert (x.dtype, labels.dtype) == (np.float32, np.int64)


def test_a_constant_column_stays_finite(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("".join(f"0.1,{n},{'ab'[n % 2]}\n" for n in range(3000)))
    columns = tabular.load(str(path)).columns
    assert columns.scale[0] == 1
    assert tabular.Columns.from_json(columns.as_json()).as_json() == columns.as_json()
    good = columns.as_json()
    for wrong in ({}, [], *(good | each for each in ({"scale": [0, 1]}, {"names": ["x"]}, {"classes": [0, 1]}))):
        with pytest.raises(ValueError):
            tabular.Columns.from_json(wrong)


def test_a_file_larger_than_memory_is_parsed_once(tmp_path: Path) -> None:
    """200,000 rows of 40 numbers are 64 MB as float64 and 16 MB of text. Python may allocate 32 MiB more."""
    path, cache = tmp_path / "large.csv", {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    path.write_text("".join(f"{'1,' * 39}{n % 7},{'ab'[n % 7 > 3]}\n" for n in range(200_000)))
    code = """
import re, resource, sys
import numpy as np
from hvdtrain.data import tabular
data_kb = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1])
resource.setrlimit(resource.RLIMIT_DATA, ((data_kb << 10) + (32 << 20),) * 2)
try:
    np.ones(64 << 17)
    sys.exit("the limit has no effect")
except MemoryError:
    pass
table = tabular.load(sys.argv[1])
print(table.fingerprint, len(table.train), table.columns.mean[39], len(table.train.features))
"""

    def load() -> subprocess.CompletedProcess[str]:
        return finished([sys.executable, "-c", code, str(path)], extra=cache)

    first, again = load(), load()
    assert first.returncode == 0, first.stderr
    assert "parsing once" in first.stderr
    assert again.stderr == ""
    assert again.stdout == first.stdout
    _, train, mean, rows = first.stdout.split()
    assert (train, rows) == ("140000", "200000")
    assert float(mean) == pytest.approx(3, abs=0.02)


def test_the_cache_finds_a_file_by_any_path_and_keeps_neither_bad_nor_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, bad = tmp_path / "t.csv", tmp_path / "bad.csv"
    path.write_text(ROWS * 20)
    bad.write_text(ROWS * 20 + "1,b\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tabular, "IN_MEMORY_BYTES", 10)
    monkeypatch.chdir(tmp_path)
    first = tabular.load(str(path)).fingerprint
    with failing(BAD_DATA, "2 fields"):
        tabular.load(str(bad))
    assert capsys.readouterr().err.count("parsing once") == 2
    assert tabular.load("t.csv").fingerprint == first
    assert capsys.readouterr().err == ""
    assert len([each for each in (tmp_path / "cache").rglob("*") if each.name == "features"]) == 1
    path.write_text(ROWS * 21)
    assert tabular.load(str(path)).fingerprint != first
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    with failing(CANNOT_WRITE, "set XDG_CACHE_HOME"):
        tabular.load(str(path))
