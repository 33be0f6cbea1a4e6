"""hvdtrain finds out what your network does to your distributed training, and beats it."""

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.1.0"


class _TritonGuard(Loader):
    """Import hook that rejects `import triton` once TensorFlow is loaded.

    Each brings its own LLVM, and Triton crashes the process if TensorFlow's is loaded first. PyTorch imports Triton
    late (in torch._dynamo, for optimizers and torch.compile) and works without it.
    """

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "triton" and sys.modules.get("tensorflow") else None

    def create_module(self, _spec: ModuleSpec) -> None:
        """Leaves it to Python to make the module."""

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(
            "triton crashes in a process that has loaded tensorflow; hint: import triton before tensorflow",
            name=module.__name__,
        )


sys.meta_path.insert(0, _TritonGuard())
