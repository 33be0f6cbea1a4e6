"""Hints for error messages on how to install missing packages, in a checkout and elsewhere."""

from __future__ import annotations

FRAMEWORKS = ("torch", "tensorflow")


def package(name: str = "") -> str:
    """How to install a package; a framework if empty."""
    setup = f"make setup FRAMEWORKS={name}" if name in FRAMEWORKS else "make setup"
    return f"run `{setup}` in a checkout, or `pip install {name or FRAMEWORKS[0]}`"


def horovod(framework: str = "") -> str:
    """How to build Horovod, for one framework or for those that are installed."""
    setup = f"make setup FRAMEWORKS={framework}" if framework else "make setup"
    return f"run `{setup}` in a checkout, or `hvdtrain build-horovod` elsewhere"
