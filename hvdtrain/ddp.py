"""Run an unmodified script whose DistributedDataParallel exchanges by a strategy.

examples:
  torchrun --nproc-per-node 2 -m hvdtrain.ddp --strategy balanced train.py --epochs 3
  torchrun --nproc-per-node 2 -m hvdtrain.ddp --strategy fast -m my.training
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from hvdtrain.comm import lifecycle
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure


def parser() -> Parser:
    top = Parser(
        prog="python -m hvdtrain.ddp",
        usage="python -m hvdtrain.ddp [--strategy S] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description=__doc__,
    )
    top.add_argument("--strategy", metavar="S", help="(default: HVDTRAIN_STRATEGY, or exact)")
    top.add_argument("-m", action="store_true", dest="module", help="SCRIPT names a module")
    top.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments")
    return top


def main(arguments: list[str]) -> None:
    """Run the script in this process. Raises Failure (2) if there is none, (78) for a strategy that does not exist."""
    options = parser().parse_args(arguments)
    sys.modules["__main__"].__file__ = next(iter(options.script), None)  # an error message names its line
    if not options.script:
        raise Failure("no script given; hint: python -m hvdtrain.ddp --strategy balanced train.py", exits.USAGE)
    script = options.script[0]
    if not options.module and not Path(script).is_file():
        raise Failure(f"{script}: no such script; hint: name a file, or -m MODULE", exits.USAGE)
    from hvdtrain.horovod_api import job  # loads Horovod's package

    strategy = job.resolved(options.strategy or os.environ.get(job.VARIABLE) or DEFAULT_REDUCER)
    from hvdtrain.torch import attached  # loads PyTorch

    attached.watch_script(strategy)
    sys.argv = options.script
    if options.module:
        sys.path.insert(0, "")
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    lifecycle.guard(debug=False)
    main(sys.argv[1:])
