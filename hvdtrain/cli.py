"""The `hvdtrain` command. The code of a subcommand is imported when that subcommand runs."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import sys
from argparse import ArgumentParser
from typing import Any, NoReturn

from hvdtrain import __version__
from hvdtrain.config.options import TrainConfig
from hvdtrain.config.parser import OptionParser, parse
from hvdtrain.launch import __main__ as launch
from hvdtrain.system import exits
from hvdtrain.system.arguments import fitted, near
from hvdtrain.system.exits import Failure

TRAIN = """Train a model. `hvdtrain train resnet ...` is the same as `python -m hvdtrain.resnet ...`.

examples:
  hvdtrain train resnet --epochs 2 --width 0.25
  horovodrun -np 4 -H a:2,b:2 hvdtrain train resnet
"""

DATA = """Prepare data for training, or list known data sets.

examples:
  hvdtrain data list
  hvdtrain data images photos prepared --size 224x224
  hvdtrain data captions Flickr8k prepared
  hvdtrain data solar 201003 oahu
  hvdtrain data vgg16 vgg16-397923af.pth vgg16.safetensors
"""

IMAGES = """Prepare a folder of images, one folder per class, for training.

If the source contains the folders train, val and test (or names with such a word), with the classes in them, they are
the parts. Images are decoded, turned upright and resized once, and stored in memory-mapped arrays.

examples:
  hvdtrain data images Fish_Dataset fish --size 197x148 --gray --split 85/2/13
  hvdtrain data images photos prepared --size 224x224 --dtype uint8 --on-bad-sample skip
  python -m hvdtrain.resnet --data fish
"""

CAPTIONS = """Prepare images with captions, such as Flickr8k, for training a captioning model.

The source may contain Flickr8k.token.txt with its three lists, Flickr30k's results.csv, COCO's
captions_*.json, or a captions.txt or captions.csv table, whose column `split` (train, val, test) is optional.
Errors name the file and the line.

examples:
  hvdtrain data captions Flickr8k prepared
  hvdtrain data captions photos prepared --split 80/10/10 --min-count 2 --on-bad-sample skip
  python -m hvdtrain.captioning --data prepared --encoder small
"""

SOLAR = """Prepare measured irradiance for training: days of NREL's Oahu grid.

Rules mark bad readings, which are counted and never filled in. Errors name the file and the line.

examples:
  hvdtrain data solar 201003 oahu
  hvdtrain data solar 201003 oahu --least -4 --most 1600 --spoils-s 300
  python -m hvdtrain.solar --data oahu --station AP1 --ahead 10
"""

VGG16 = """Convert VGG16's published ImageNet weights into a file for `--weights`.

The source is torchvision's state dict, a file of torch.save.

examples:
  hvdtrain data vgg16 vgg16-397923af.pth vgg16.safetensors
  python -m hvdtrain.captioning --data prepared --weights vgg16.safetensors
"""


LAUNCH = """Start ranks with settings that suit the link between their hosts, each printed with its reason.

examples:
  hvdtrain launch mpirun -np 2 python -m hvdtrain.resnet
  hvdtrain launch horovodrun -H a:2,b:2 python -m hvdtrain.resnet
  hvdtrain launch torchrun -H a:1,b:1 --strategy fast train.py
"""


HOSTS = """Make other hosts ready for a job.

examples:
  hvdtrain hosts prepare -H a:1,b:1 --dry-run
  hvdtrain hosts prepare -H a:1,b:1
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """A module with `main(arguments)`, which returns the exit code, and `parser()`."""

    module: str

    def run(self, arguments: list[str]) -> int:
        return importlib.import_module(f"hvdtrain.{self.module}").main(arguments)

    def parser(self) -> ArgumentParser:
        return importlib.import_module(f"hvdtrain.{self.module}").parser()


@dataclasses.dataclass(frozen=True)
class Launcher:
    """`hvdtrain launch NAME`, which does what launch/NAME.sh of a checkout does."""

    name: str

    def run(self, arguments: list[str]) -> int:
        return launch.main([self.name, *arguments], f"hvdtrain launch {self.name}")

    def parser(self) -> ArgumentParser:
        return launch.parser(self.name, f"hvdtrain launch {self.name}")


@dataclasses.dataclass(frozen=True)
class Training:
    """A workload, run like `python -m MODULE`."""

    name: str

    def run(self, arguments: list[str]) -> int:
        from hvdtrain.comm import lifecycle
        from hvdtrain.config import workloads

        def main(stop: lifecycle.StopSignal) -> int:
            module = workloads.module(self.name)
            sys.argv = [module.__file__, *arguments]
            return module.main(stop)

        lifecycle.run(main, debug="--debug" in arguments)  # ends the process
        return exits.OK

    def parser(self) -> ArgumentParser:
        from hvdtrain.config import workloads

        module = workloads.module(self.name)
        own = (each for each in vars(module).values() if _is_config_of(each, module.__name__))
        cls, prog = next(own, TrainConfig), f"python -m {module.__name__}"
        return OptionParser(cls, prog=prog, purpose=module.__doc__ or "")


def _is_config_of(thing: Any, module: str) -> bool:
    return isinstance(thing, type) and issubclass(thing, TrainConfig) and thing.__module__ == module


@dataclasses.dataclass(frozen=True)
class Preparation:
    """`hvdtrain data NAME SOURCE DESTINATION`: parses a config, calls a function with it, and prints the result."""

    name: str
    module: str
    config: str
    function: str
    purpose: str

    def _about(self) -> tuple[Any, dict[str, Any]]:
        module = importlib.import_module(f"hvdtrain.{self.module}")
        settings = {"prog": f"hvdtrain data {self.name}", "purpose": self.purpose}
        return module, {**settings, "positionals": ("source", "destination")}

    def run(self, arguments: list[str]) -> int:
        module, settings = self._about()
        config = parse(getattr(module, self.config), arguments, **settings)
        print(json.dumps(getattr(module, self.function)(config), indent=2))
        return exits.OK

    def parser(self) -> ArgumentParser:
        module, settings = self._about()
        return OptionParser(getattr(module, self.config), **settings)


# words of the command -> (purpose, command)
COMMANDS: dict[tuple[str, ...], tuple[str, Part | Preparation | Launcher]] = {
    ("launch", "mpirun"): ("start ranks with Open MPI's mpirun", Launcher("mpirun")),
    ("launch", "horovodrun"): ("start ranks with Horovod's horovodrun", Launcher("horovodrun")),
    ("launch", "torchrun"): ("start the ranks of a DDP script on all hosts", Part("torchrun.command")),
    ("hosts", "prepare"): ("copy this environment and this folder to the other hosts", Part("launch.prepare")),
    ("slurm",): ("submit a job to Slurm that requeues itself and resumes", Part("launch.slurm")),
    ("build-horovod",): ("build and install Horovod for the installed frameworks", Part("launch.build_horovod")),
    ("data", "list"): ("list known data sets: size, licence, source", Part("data.listed")),
    ("data", "images"): (
        "prepare a folder of images for training",
        Preparation("images", "data.images", "ImagesConfig", "prepare", IMAGES),
    ),
    ("data", "captions"): (
        "prepare images with captions",
        Preparation("captions", "captions.prepare", "CaptionsConfig", "prepare", CAPTIONS),
    ),
    ("data", "solar"): (
        "prepare measured irradiance for training",
        Preparation("solar", "data.solar_prepare", "SolarConfig", "prepare", SOLAR),
    ),
    ("data", "vgg16"): (
        "convert VGG16's published weights for --weights",
        Preparation("vgg16", "models.vgg16_weights", "Vgg16Config", "import_weights", VGG16),
    ),
    ("predict",): ("use a trained model: classes, captions, forecasts, scores", Part("inference.command")),
    ("cluster",): ("virtual hosts on this machine: up, down, status, exec, shell, hostfile", Part("lab.__main__")),
    ("throttle",): ("limit the bandwidth of links, show, verify and clear the limits", Part("lab.throttle.__main__")),
    ("doctor",): ("find problems that would make a job hang or crawl", Part("doctor.__main__")),
    ("monitors",): ("list this host's power and resource sensors", Part("monitors.__main__")),
    ("strategies",): ("list presets and strategies, with what they cost", Part("strategies.catalog")),
    ("plan",): ("predict steps on other hosts, links and strategies", Part("plan.command")),
    ("measure",): ("measure hosts and their links for training, as one small file", Part("measure")),
    ("sweep",): ("run a grid of experiments, skip the finished ones", Part("sweep.__main__")),
    ("results",): ("tables, plots and reports from run folders", Part("results.__main__")),
}
GROUPS = {"train": TRAIN, "launch": LAUNCH, "hosts": HOSTS, "data": DATA}
"""Command groups and their help"""
HELP: tuple[list[str], ...] = ([], ["--help"], ["-h"])


def commands(group: str) -> dict[tuple[str, ...], tuple[str, Part | Preparation | Launcher | Training]]:
    """The commands of a group, or all commands except the workloads."""
    if group != "train":
        return {words: command for words, command in COMMANDS.items() if group in ("", words[0])}
    from hvdtrain.config import workloads

    return {("train", name): (_about(module), Training(name)) for name, module in sorted(workloads.known().items())}


def _about(module: str) -> str:
    """The first line of a workload's docstring, without importing the workload."""
    try:
        source = importlib.util.find_spec(module).loader.get_source(module)  # type: ignore[union-attr]
        about = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].rstrip(".")
    except Exception:  # importing it reports the error
        return f"(cannot be read: {module})"
    return about[:1].lower() + about[1:]


def usage(group: str = "") -> str:
    """The list of all commands, or of a group's commands."""
    listed = {words: about for words, (about, _) in commands(group).items()}
    more = "For help on a command, run it with --help."
    if not group:
        listed = {("train", "WORKLOAD"): "train a model (`hvdtrain train` lists the workloads)", **listed}
    lines = [f"  hvdtrain {' '.join(words):<17} {about}" for words, about in listed.items()]
    return "\n".join([GROUPS.get(group, "hvdtrain: distributed training over ordinary networks\n"), *lines, "", more])


def main() -> NoReturn:
    exits.end(command, sys.argv[1:])


def command(arguments: list[str]) -> int:
    """Runs a command line and returns the exit code. Raises Failure."""
    group = arguments[0] if arguments and arguments[0] in GROUPS else ""
    if arguments[bool(group) :] in HELP:
        print(fitted(usage(group)))
        return exits.OK if arguments[bool(group) :] else exits.USAGE
    if arguments == ["--version"]:
        print(f"hvdtrain {__version__}")
        return exits.OK
    known = commands(group)
    for words, (_, entry) in known.items():
        if tuple(arguments[: len(words)]) == words:
            return entry.run(arguments[len(words) :])
    listed = [" ".join(words) for words in known] + [each for each in GROUPS if not group]
    name = " ".join(arguments[: 2 if group else 1])
    raise Failure(f"unknown command {name!r}{near(name, listed)} (known: {', '.join(listed)})", exits.USAGE)


if __name__ == "__main__":
    main()
