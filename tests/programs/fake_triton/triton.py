"""Stands for triton, which PyTorch's CUDA builds import late: it crashes a process that has loaded TensorFlow first."""

import os
import sys

if "tensorflow" in sys.modules and "FAKE_TRITON" not in os.environ:
    os.abort()
os.environ["FAKE_TRITON"] = "loaded in time"
raise ImportError("not installed, as with a CPU build")
