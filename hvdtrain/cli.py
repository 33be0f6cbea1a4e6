"""The `hvdtrain` command: what is not training itself. Each part is imported when its subcommand runs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import NoReturn

from hvdtrain import __version__, config, exits

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


def data_captions(arguments: list[str]) -> int:
    from hvdtrain.data.caption_prepare import CaptionsConfig, prepare

    settings = config.parse(
        CaptionsConfig,
        arguments,
        prog="hvdtrain data captions",
        purpose=CAPTIONS,
        positionals=("source", "destination"),
    )
    print(json.dumps(prepare(settings), indent=2))
    return exits.OK


def data_vgg16(arguments: list[str]) -> int:
    from hvdtrain.models.vgg16_weights import Vgg16Config, import_weights

    settings = config.parse(
        Vgg16Config, arguments, prog="hvdtrain data vgg16", purpose=VGG16, positionals=("source", "destination")
    )
    print(json.dumps(import_weights(settings), indent=2))
    return exits.OK


def data_images(arguments: list[str]) -> int:
    from hvdtrain.data.images import ImagesConfig, prepare

    settings = config.parse(
        ImagesConfig, arguments, prog="hvdtrain data images", purpose=IMAGES, positionals=("source", "destination")
    )
    print(json.dumps(prepare(settings), indent=2))
    return exits.OK


def part(room: str) -> Callable[[list[str]], int]:
    """What `python -m hvdtrain.ROOM` does, imported when it is called."""

    def main(arguments: list[str]) -> int:
        code: int = importlib.import_module(f"hvdtrain.{room}.__main__").main(arguments)
        return code

    return main


# words -> (what it does, the function that takes the arguments behind them)
COMMANDS: dict[tuple[str, ...], tuple[str, Callable[[list[str]], int]]] = {
    ("data", "images"): ("prepare a folder of pictures for training", data_images),
    ("data", "captions"): ("prepare pictures with sentences", data_captions),
    ("data", "vgg16"): ("VGG16's published weights as --weights takes them", data_vgg16),
    ("cluster",): ("virtual hosts on this machine: up, down, status, exec, shell, hostfile", part("cluster")),
    ("throttle",): ("limit the bandwidth of links, show it, verify it, put it back", part("cluster.throttle")),
    ("doctor",): ("find what would make a job hang or crawl, before it starts", part("cluster.doctor")),
    ("monitors",): ("which power and resource sensors this host has", part("monitors")),
    ("sweep",): ("run a grid of experiments, skip what is done", part("sweep")),
    ("results",): ("tables, plots and a report from runs' records", part("results")),
}


def usage() -> str:
    lines = [f"  hvdtrain {' '.join(words):<15}{purpose}" for words, (purpose, _) in COMMANDS.items()]
    return (
        "hvdtrain: what is not training itself\n\n"
        + "\n".join(lines)
        + "\n\nEach has a --help of its own. Training is started by its entry point: python -m hvdtrain.resnet --help"
    )


def main() -> NoReturn:
    arguments = sys.argv[1:]
    if arguments in ([], ["--help"], ["-h"]):
        print(usage())
        raise SystemExit(exits.OK if arguments else exits.USAGE)
    if arguments == ["--version"]:
        print(f"hvdtrain {__version__}")
        raise SystemExit(exits.OK)
    for words, (_, function) in COMMANDS.items():
        if tuple(arguments[: len(words)]) == words:
            exits.end(function, arguments[len(words) :])
    known = ", ".join(" ".join(words) for words in COMMANDS)
    asked = " ".join(arguments[:2])
    print(f"hvdtrain: unknown command {asked!r}; known: {known} (see hvdtrain --help)", file=sys.stderr)
    raise SystemExit(exits.USAGE)


if __name__ == "__main__":
    main()
