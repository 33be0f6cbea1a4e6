"""`hvdtrain results inference` and its figure: from which model on a GPU is faster, and what is missing to say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import runs
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hvdtrain.results import plots
from hvdtrain.results.__main__ import main
from hvdtrain.results.load import load

SIZES = (1_000, 10_000, 100_000)


def test_the_crossover_is_the_first_model_from_which_on_the_gpu_is_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CPU takes 1 us per parameter and sample, a GPU 30 ms and a tenth of that; a training step is 64 samples."""

    def made(device: str, parameters: int, seed: int) -> None:
        fixed_s, each_s = (0.0, 1e-6) if device == "cpu" else (0.03, 1e-7)
        times = {samples: fixed_s + samples * each_s * parameters for samples in (2, 64)}
        runs.make(
            tmp_path / device / f"{parameters}-{seed}",
            device="cpu" if device == "cpu" else "cuda:0",
            parameters=parameters,
            seed=seed,
            data_s=0.0,
            compute_s=times[64],
            communication_s=0.0,
            inference=times,
        )

    for parameters in SIZES:
        for seed in range(2):
            made("cpu", parameters, seed)
    assert main(["inference", str(tmp_path), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert "nothing was timed on a gpu" in alone["notes"][0]
    assert "hvdtrain train resnet --device gpu --inference" in alone["notes"][0]
    for parameters in SIZES:
        made("gpu", parameters, 0)
    assert main(["inference", str(tmp_path), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [(row["parameters"], row["device"], row["n"]) for row in table["rows"]] == [
        (parameters, device, n) for parameters in SIZES for device, n in (("cpu", 2), ("gpu", 1))
    ]
    assert table["rows"][3]["64_samples_s"]["mean"] == pytest.approx(0.03 + 64e-7 * 10_000)
    assert [note.partition(" (")[0] for note in table["notes"][:3]] == [
        "training step: the GPU is faster from 1,000 parameters on",
        "2 samples: the GPU is faster from 100,000 parameters on",
        "64 samples: the GPU is faster from 1,000 parameters on",
    ]
    figure = plots.draw("crossover", load([tmp_path]))
    FigureCanvasAgg(figure).draw()
    assert [axis.get_title(loc="left") or axis.get_title() for axis in figure.axes] == [
        *("training step", "2 samples", "64 samples")
    ]
    for line, times in zip(figure.axes[1].containers, ((2e-6, 0), (2e-7, 0.03)), strict=True):
        assert line[0].get_ydata() == pytest.approx([1e3 * (times[1] + times[0] * size) for size in SIZES])
