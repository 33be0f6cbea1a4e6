"""List the data sets that the workloads know: contents, licence, source and how to get them.

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
UCI = "UCI Machine Learning Repository"
SHIPPED = "shipped with hvdtrain"
FASHION = "/usr/share/datasets/fashion-mnist"
PACKAGE = "dataset-fashion-mnist"
GET_FASHION = (
    f"as root, apt-get install {PACKAGE}; or apt-get download {PACKAGE}, dpkg-deb -x {PACKAGE}_*.deb FOLDER, "
    f"and --data idx:FOLDER{FASHION}"
)
OWN = "bring your own; nothing is downloaded"


@dataclass(frozen=True, kw_only=True)
class Known:
    """A data set, or a kind of data set."""

    name: str
    """Value of --data"""
    workload: str
    holds: str
    """Contents and size"""
    licence: str = "yours"
    source: str = "yours"
    get: str = OWN
    """Command that installs or prepares the data set"""
    needs: str | None = None
    """Python package or folder that must exist; None if nothing is needed or the user brings the data"""

    @property
    def here(self) -> bool | None:
        """Whether it can be used now; None for data that users bring."""
        if self.get == OWN or self.get.startswith("hvdtrain data"):
            return None
        if self.needs is None:
            return True
        return Path(self.needs).is_dir() if "/" in self.needs else importlib.util.find_spec(self.needs) is not None


DATA = (
    Known(
        name="digits",
        workload="resnet",
        holds="1,797 gray images of 8x8, handwritten digits in 10 classes",
        licence="CC BY 4.0",
        source=f"Alpaydin and Kaynak 1998, {UCI}",
        get=SHIPPED,
    ),
    Known(
        name="fashion-mnist",
        workload="resnet",
        holds="70,000 gray images of 28x28 in 10 classes, 31 MB (54,000 training, 6,000 validation, 10,000 test)",
        licence="MIT",
        source="Xiao, Rasul, Vollgraf 2017, packaged by Debian",
        get=GET_FASHION,
        needs=FASHION,
    ),
    Known(
        name="idx:DIR",
        workload="resnet",
        holds="gray images in four IDX files, in the format of MNIST",
        licence="the authors'",
        source="MNIST and its successors, for example",
    ),
    Known(
        name="FOLDER",
        workload="resnet",
        holds="images of any size, one folder per class",
        get="hvdtrain data images SOURCE FOLDER --size WIDTHxHEIGHT",
    ),
    Known(
        name="shapes",
        workload="captioning",
        holds="5,000 scenes of coloured shapes with five sentences each",
        licence="Apache 2.0",
        source="drawn at the start of a run",
        get=SHIPPED,
    ),
    Known(
        name="flickr8k:DIR",
        workload="captioning",
        holds="8,091 photographs with five sentences each, 1.1 GB",
        licence="the authors' and photographers'; not redistributed here",
        source="Hodosh, Young, Hockenmaier 2013",
    ),
    Known(
        name="FOLDER",
        workload="captioning",
        holds="images with sentences",
        get="hvdtrain data captions SOURCE FOLDER",
    ),
    Known(
        name="pvanalytics",
        workload="solar",
        holds="165,588 means of 15 minutes of irradiance in W/m2, 2019 to 2023, 2.5 MB",
        licence="MIT",
        source="system 15 of PVDAQ (doi:10.25984/1846021), shipped with pvanalytics",
        get="pip install --no-deps -c tools/constraints.txt pvanalytics pyarrow",
        needs="pvanalytics",
    ),
    Known(
        name="FOLDER",
        workload="solar",
        holds="irradiance of one or more stations: NREL's Oahu grid, MIDC exports, BSRN files",
        licence="the authors'",
        source="NREL, BSRN",
        get="hvdtrain data solar SOURCE FOLDER",
    ),
    *(
        Known(name=name, workload="tabular", holds=holds, licence="CC BY 4.0", source=f"{authors}, {UCI}", get=SHIPPED)
        for name, holds, authors in (
            ("breast-cancer", "569 rows of 30 features in 2 classes", "Wolberg, Mangasarian, Street 1993"),
            ("iris", "150 rows of 4 features in 3 classes", "Fisher 1936"),
            ("wine", "178 rows of 13 features in 3 classes", "Aeberhard and Forina 1992"),
        )
    ),
    Known(name="FILE.csv", workload="tabular", holds="rows of features, with the class in the last column"),
)


def parser() -> Parser:
    one = Parser(prog="hvdtrain data list", description=__doc__)
    one.add_argument("--json", action="store_true", help="print one JSON document")
    return one


def main(arguments: list[str]) -> int:
    """Prints the list; returns the exit code."""
    if parser().parse_args(arguments).json:
        print(json.dumps({"schema": SCHEMA, "data": [{**asdict(known), "here": known.here} for known in DATA]}))
        return exits.OK
    width = min(shutil.get_terminal_size().columns, 120)
    for known in DATA:
        print(f"{known.workload} --data {known.name}{'' if known.here is not False else ' (not here)'}")
        lines = {"holds": known.holds, "licence": known.licence, "source": known.source, "get it": known.get}
        for name, text in lines.items():
            print(textwrap.fill(text, width, initial_indent=f"  {name:<9}", subsequent_indent=" " * 11))
    return exits.OK
