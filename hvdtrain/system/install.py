"""Hints for error messages on how to install missing packages: in a checkout, and after `pip install hvdtrain`."""

from __future__ import annotations

FRAMEWORKS = ("torch", "tensorflow")


def package(name: str = "") -> str:
    """How to install a package, or a framework in the version that hvdtrain supports; both frameworks if empty."""
    if name in FRAMEWORKS:
        return f"run `make setup FRAMEWORKS={name}` in a checkout, or `pip install 'hvdtrain[{name}]'`"
    extras = name or "'hvdtrain[torch]'"
    return f"run `make setup` in a checkout, or `pip install {extras}`"


def horovod(framework: str = "") -> str:
    """How to build Horovod, for one framework or for those that are installed."""
    setup = f"make setup FRAMEWORKS={framework}" if framework else "make setup"
    return f"run `{setup}` in a checkout, or `hvdtrain build-horovod` after `pip install hvdtrain`"
