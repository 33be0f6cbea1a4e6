"""The `hvdtrain` command: what is not training itself. Each part is imported when its subcommand runs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain import __version__, config, exits
from hvdtrain.arguments import Parser, near
from hvdtrain.exits import Failure

DATA = """Prepare what training reads: pictures, pictures with sentences, or the weights of a frozen encoder.

examples:
  hvdtrain data images photos prepared --size 224x224
  hvdtrain data captions Flickr8k prepared
  hvdtrain data vgg16 vgg16-397923af.pth vgg16.safetensors
"""

IMAGES = """Prepare a folder of pictures, one folder per class, for training.

Every picture is decoded, turned upright, resized and stored once in memory-mapped arrays, so that a run reads them at
once. An interrupted preparation goes on where it was when the same command is given again.

examples:
  hvdtrain data images Fish_Dataset fish --size 197x148 --gray --split 85/2/13
  hvdtrain data images photos prepared --size 224x224 --dtype uint8 --on-bad-sample skip
  python -m hvdtrain.resnet --data fish
"""


CAPTIONS = """Prepare pictures with sentences, Flickr8k as it is distributed for one, for training a captioning model.

The source may hold Flickr8k.token.txt with its three lists, a captions.txt table, or COCO's or Karpathy's JSON. What
is wrong with it is told by file and line. An interrupted preparation goes on when the same command is given again.

examples:
  hvdtrain data captions Flickr8k prepared
  hvdtrain data captions photos prepared --split 80/10/10 --min-count 2 --on-bad-sample skip
  python -m hvdtrain.captioning --data prepared --encoder small
"""

VGG16 = """Turn VGG16's published ImageNet weights into the file that `--weights` takes.

The source is torchvision's state dict (torch.save, safetensors or npz), or Keras' arrays as npz or safetensors.

examples:
  hvdtrain data vgg16 vgg16-397923af.pth vgg16.safetensors
  python -m hvdtrain.captioning --data flickr8k:Flickr8k --weights vgg16.safetensors
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """What `python -m hvdtrain.ROOM` does; imported when it is asked for."""

    room: str

    def run(self, arguments: list[str]) -> int:
        code: int = importlib.import_module(f"hvdtrain.{self.room}.__main__").main(arguments)
        return code

    def parser(self) -> ArgumentParser:
        made: ArgumentParser = importlib.import_module(f"hvdtrain.{self.room}.__main__").parser()
        return made


@dataclasses.dataclass(frozen=True)
class Preparation:
    """`hvdtrain data NAME SOURCE DESTINATION`: a config class and the function that takes one, imported when asked for.

    The function returns the document that is printed.
    """

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
        asked = config.parse(getattr(module, self.config), arguments, **settings)
        print(json.dumps(getattr(module, self.function)(asked), indent=2))
        return exits.OK

    def parser(self) -> ArgumentParser:
        module, settings = self._about()
        made: ArgumentParser = config.parser_for(getattr(module, self.config), **settings)
        return made


# words -> (what it does, what takes the arguments behind them)
COMMANDS: dict[tuple[str, ...], tuple[str, Part | Preparation]] = {
    ("data", "images"): (
        "prepare a folder of pictures for training",
        Preparation("images", "data.images", "ImagesConfig", "prepare", IMAGES),
    ),
    ("data", "captions"): (
        "prepare pictures with sentences",
        Preparation("captions", "captions.prepare", "CaptionsConfig", "prepare", CAPTIONS),
    ),
    ("data", "vgg16"): (
        "VGG16's published weights as --weights takes them",
        Preparation("vgg16", "models.vgg16_weights", "Vgg16Config", "import_weights", VGG16),
    ),
    ("cluster",): ("virtual hosts on this machine: up, down, status, exec, shell, hostfile", Part("cluster")),
    ("throttle",): ("limit the bandwidth of links, show it, verify it, put it back", Part("cluster.throttle")),
    ("doctor",): ("find what would make a job hang or crawl, before it starts", Part("cluster.doctor")),
    ("monitors",): ("which power and resource sensors this host has", Part("monitors")),
    ("sweep",): ("run a grid of experiments, skip what is done", Part("sweep")),
    ("results",): ("tables, plots and a report from runs' records", Part("results")),
}
SHELLS = ("bash", "zsh")
HELP: tuple[list[str], ...] = ([], ["--help"], ["-h"])


def usage(group: str = "") -> str:
    """The commands, all or those of a group."""
    chosen = {words: purpose for words, (purpose, _) in COMMANDS.items() if group in ("", words[0])}
    lines = [f"  hvdtrain {' '.join(words):<15}{purpose}" for words, purpose in chosen.items()]
    more = "Each has a --help of its own."
    if not group:
        more += " Training is started by its entry point: python -m hvdtrain.resnet --help\n"
        more += 'Completion of commands and flags: eval "$(hvdtrain --print-completion bash)" (or zsh)'
    return "\n".join([DATA if group else "hvdtrain: what is not training itself\n", *lines, "", more])


def completion(shell: str) -> str:
    """A script that completes commands, flags and files. Raises Failure (2, 69)."""
    if shell not in SHELLS:
        raise Failure(f"--print-completion{shell and ' '}{shell}: give one of {', '.join(SHELLS)}", exits.USAGE)
    try:
        import shtab
    except ImportError:
        raise Failure("--print-completion needs shtab: pip install shtab", exits.UNREACHABLE) from None

    top = Parser(prog="hvdtrain", description="What is not training itself.")
    top.add_argument("--version", action="store_true")
    top.add_argument("--print-completion", choices=SHELLS)
    groups: dict[tuple[str, ...], Any] = {(): top.add_subparsers()}
    for words, (purpose, command) in COMMANDS.items():
        if words[:-1] not in groups:
            groups[words[:-1]] = groups[()].add_parser(words[0], help=DATA.partition("\n")[0]).add_subparsers()
        parser = command.parser()
        for action in parser._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        groups[words[:-1]].add_parser(words[-1], help=purpose, parents=[parser], add_help=False)
    return shtab.complete(top, shell)


def main() -> NoReturn:
    arguments = sys.argv[1:]
    groups = {words[0] for words in COMMANDS if len(words) > 1}
    group = arguments.pop(0) if arguments and arguments[0] in groups and arguments[1:2] in HELP else ""
    if arguments in HELP:
        print(usage(group))
        raise SystemExit(exits.OK if arguments else exits.USAGE)
    if arguments[:1] == ["--print-completion"]:
        exits.end(lambda words: print(completion(" ".join(words))) or exits.OK, arguments[1:])
    if arguments == ["--version"]:
        print(f"hvdtrain {__version__}")
        raise SystemExit(exits.OK)
    for words, (_, command) in COMMANDS.items():
        if tuple(arguments[: len(words)]) == words:
            exits.end(command.run, arguments[len(words) :])
    known = [" ".join(words) for words in COMMANDS]
    asked = " ".join(arguments[: 2 if arguments[0] in groups else 1])
    meant = near(asked, [*known, *groups])
    print(f"hvdtrain: unknown command {asked!r}{meant} (known: {', '.join(known)})", file=sys.stderr)
    raise SystemExit(exits.USAGE)


if __name__ == "__main__":
    main()
