"""PyTorch's profiler of operations on the CPU and kernels on the GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function, supported_activities

from hvdtrain.system import stderr

NOTES = (b"USDT:", b"SyncActivityProfilerHandler")


class TorchProfiler:
    """See `frameworks.Profiler`."""

    def start(self, folder: Path) -> None:
        self._folder = folder
        self._profile: Any = profile(activities=supported_activities())
        with stderr.suppress(NOTES):
            self._profile.start()

    def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        return record_function(f"ProfilerStep#{number}")  # PyTorch's tools recognise this name

    def stop(self, name: str) -> Path:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        path = self._folder / f"{name}.pt.trace.json.gz"
        with stderr.suppress(NOTES):
            self._profile.stop()
            self._profile.export_chrome_trace(str(path))
        self._profile = None
        return path
