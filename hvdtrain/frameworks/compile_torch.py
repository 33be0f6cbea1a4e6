"""`--compile`: a model's loss, compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


def compiled(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles `loss` when it is first called, for any number of samples.

    Otherwise a short last batch would compile it again. It raises Failure (78) if the compiler fails.
    """
    function = torch.compile(loss)

    def call(*arrays: torch.Tensor) -> Any:
        for array in arrays:
            torch._dynamo.maybe_mark_dynamic(array, 0)
        try:
            return function(*arrays)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = str(error).strip().splitlines()[0]
            hint = "install a C++ compiler and Python's headers (Debian: g++ python3-dev), or leave out --compile"
            raise Failure(f"--compile: {reason}; hint: {hint}", exits.BAD_CONFIG) from error

    return call
