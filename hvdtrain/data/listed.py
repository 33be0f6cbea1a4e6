"""The data sets that workloads know: what each holds, its licence, where it is from and how to get it.

examples:
  hvdtrain data list
  hvdtrain data list --json

"""

from __future__ import annotations

import importlib.util
import json
import shutil
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser

SCHEMA = "hvdtrain/data/1"
UCI = "UCI Machine Learning Repository, as scikit-learn ships it"
SKLEARN = "pip install scikit-learn"
FASHION = "/usr/share/datasets/fashion-mnist"
PACKAGE = "dataset-fashion-mnist"
GET_FASHION = (
    f"with root, apt-get install {PACKAGE}; without, apt-get download {PACKAGE}, dpkg-deb -x {PACKAGE}_*.deb FOLDER, "
    f"and --data idx:FOLDER{FASHION}"
)
OWN = "bring your own; nothing is downloaded"


@dataclass(frozen=True, kw_only=True)
class Known:
    """A data set, or a kind of them."""

    name: str
    """What --data takes"""
    workload: str
    holds: str
    """What there is, and how much"""
    licence: str = "yours"
    source: str = "yours"
    get: str = OWN
    """The command that brings it, or what to do"""
    needs: str | None = None
    """The package or the folder without which it is not here; None: nothing, or that is the user's to know"""

    @property
    def here(self) -> bool | None:
        """Whether it can be used at once; None of what users bring."""
        if self.get == OWN or self.get.startswith("hvdtrain data"):
            return None
        if self.needs is None:
            return True
        return Path(self.needs).is_dir() if "/" in self.needs else importlib.util.find_spec(self.needs) is not None


DATA = (
    Known(
        name="digits",
        workload="resnet",
        holds="1,797 gray pictures of 8x8, handwritten digits in 10 classes",
        licence="CC BY 4.0",
        source=f"Alpaydin and Kaynak 1998, {UCI}",
        get=SKLEARN,
        needs="sklearn",
    ),
    Known(
        name="fashion-mnist",
        workload="resnet",
        holds="70,000 gray pictures of 28x28 in 10 classes, 31 MB (54,000 training, 6,000 validation, 10,000 test)",
        licence="MIT",
        source="Xiao, Rasul, Vollgraf 2017, as Debian packages it",
        get=GET_FASHION,
        needs=FASHION,
    ),
    Known(
        name="idx:DIR",
        workload="resnet",
        holds="gray pictures in the four IDX files of MNIST's form",
        licence="theirs",
        source="MNIST and its successors, say",
    ),
    Known(
        name="FOLDER",
        workload="resnet",
        holds="pictures of any size, one folder per class",
        get="hvdtrain data images PICTURES FOLDER --size WIDTHxHEIGHT",
    ),
    Known(
        name="shapes",
        workload="captioning",
        holds="5,000 scenes of coloured shapes with five sentences each",
        licence="Apache 2.0",
        source="drawn at the start of a run",
        get="comes with hvdtrain",
    ),
    Known(
        name="flickr8k:DIR",
        workload="captioning",
        holds="8,091 photographs with five sentences each, 1.1 GB",
        licence="its authors' and photographers'; not redistributed here",
        source="Hodosh, Young, Hockenmaier 2013",
    ),
    Known(
        name="FOLDER",
        workload="captioning",
        holds="pictures with sentences",
        get="hvdtrain data captions SOURCE FOLDER",
    ),
    Known(
        name="pvanalytics",
        workload="solar",
        holds="165,588 means of 15 minutes of irradiance in W/m2, 2019 to 2023, 2.5 MB",
        licence="MIT",
        source="system 15 of PVDAQ (doi:10.25984/1846021), as pvanalytics ships it",
        get="pip install --no-deps -c tools/constraints.txt pvanalytics pyarrow",
        needs="pvanalytics",
    ),
    Known(
        name="FOLDER",
        workload="solar",
        holds="irradiance of one station or several: NREL's Oahu grid, MIDC exports, BSRN files",
        licence="theirs",
        source="NREL, BSRN",
        get="hvdtrain data solar SOURCE FOLDER",
    ),
    *(
        Known(
            name=name,
            workload="tabular",
            holds=holds,
            licence="CC BY 4.0",
            source=f"{authors}, {UCI}",
            get=SKLEARN,
            needs="sklearn",
        )
        for name, holds, authors in (
            ("breast-cancer", "569 rows of 30 features in 2 classes", "Wolberg, Mangasarian, Street 1995"),
            ("iris", "150 rows of 4 features in 3 classes", "Fisher 1936"),
            ("wine", "178 rows of 13 features in 3 classes", "Aeberhard and Forina 1991"),
        )
    ),
    Known(name="FILE.csv", workload="tabular", holds="rows of features, the class last"),
)


def parser() -> Parser:
    one = Parser(prog="hvdtrain data list", description=__doc__)
    one.add_argument("--json", action="store_true", help="print one JSON document")
    return one


def main(arguments: list[str]) -> int:
    """Prints the list; returns the exit code."""
    if parser().parse_args(arguments).json:
        print(json.dumps({"schema": SCHEMA, "data": [{**asdict(each), "here": each.here} for each in DATA]}))
        return exits.OK
    width = min(shutil.get_terminal_size().columns, 120)
    for each in DATA:
        print(f"{each.workload} --data {each.name}{'' if each.here is not False else ' (not here)'}")
        lines = {"holds": each.holds, "licence": each.licence, "source": each.source, "get it": each.get}
        for name, text in lines.items():
            print(textwrap.fill(text, width, initial_indent=f"  {name:<9}", subsequent_indent=" " * 11))
    return exits.OK
