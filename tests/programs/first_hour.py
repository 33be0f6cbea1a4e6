"""What a user runs in the first hour, with the packages that `make demo` installs: every command that `hvdtrain --help`
lists (test_contract checks that), and the first example of each workload. Stops at the first one that fails or asks for
a package.

Usage: first_hour.py FOLDER, with the environment active. It needs no root, and writes to the empty folder only. With
--session, the README's session follows, in the checkout and with sudo, without its last line: its cluster stays up.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parent.parent.parent
RUN = "--width 0.125 --image-size 8 --batch-size 48 --epochs 1 --run-dir"
COMMANDS = {
    "python -m hvdtrain.resnet --epochs 2 --width 0.25": (),
    "python -m hvdtrain.captioning --epochs 1 --epoch-samples 128 --run-dir results/captions": (),  # 8 in the example
    "python -m hvdtrain.tabular --layers 30,10": (),
    "python -m hvdtrain.solar": (65,),  # says where its data come from
    "hvdtrain train tabular --data one.csv --run-dir results/tabular --epochs 2": (),
    f"hvdtrain launch mpirun -np 2 python -m hvdtrain.resnet {RUN} results/a": (),
    f"hvdtrain launch horovodrun -np 2 -H localhost:2 python -m hvdtrain.resnet --seed 1 {RUN} results/b": (),
    f"mpirun -np 2 python -m hvdtrain.resnet --seed 2 {RUN} results/c": (),
    "hvdtrain launch torchrun --dry-run -H localhost:2 --strategy powersgd train.py": (),
    "hvdtrain hosts prepare --dry-run -H localhost:2": (),
    "hvdtrain slurm --dry-run -N 2 -- true": (),
    "hvdtrain build-horovod": (),  # installs the wheel that `make demo` has built
    "hvdtrain data list": (),
    "hvdtrain data images photos prepared --size 8x8": (),
    "hvdtrain data captions captions described": (),
    "hvdtrain data solar nothing oahu": (65, 74),
    "hvdtrain data vgg16 nothing vgg16.safetensors": (65, 74),
    "hvdtrain predict results/captions --split test": (),
    "hvdtrain predict results/tabular one.csv --out answers.csv": (),
    "hvdtrain predict results/a photos/cats": (),
    "hvdtrain cluster status --name first": (69,),  # there is none
    "hvdtrain throttle 10mbit --dev lo --force --dry-run": (),
    "hvdtrain doctor --quick": (),
    "hvdtrain monitors": (),
    "hvdtrain plan --help": (),
    "hvdtrain plan resnet --width 0.25 --hosts 1..4 --rates 10mbit": (),
    "hvdtrain strategies": (),
    "hvdtrain measure --dry-run -H a:1,b:1": (),
    "hvdtrain sweep quick --dry-run": (),
    "hvdtrain results list results/": (),
    "hvdtrain results show results/a": (),
    "hvdtrain results table results/": (),
    "hvdtrain results scaling results/": (),
    "hvdtrain results energy results/": (),
    "hvdtrain results accuracy results/": (),
    "hvdtrain results strategies results/ --target 0.01": (),
    "hvdtrain results phases results/": (),
    "hvdtrain results export results/": (),
    "hvdtrain results plot time results/ -o time.svg": (),
    "hvdtrain results report results/ -o report.html": (),
}
"""Commands, with exit codes besides 0. `prepare` makes one.csv, photos and captions"""
PACKAGE = re.compile(r"needs the package|No module named|pip install (?!--no-deps -c tools)|dependency|Traceback")


def prepare(folder: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [",".join(f"{x:.3f}" for x in draw.normal(size=3)) + f",{'ab'[i % 2]}" for i in range(200)]
    (folder / "one.csv").write_text("\n".join(["x,y,z,class", *rows, ""]))
    described = ["image,caption"]
    for number in range(40):
        image = Image.fromarray(draw.integers(0, 256, (12, 12, 3), np.uint8))
        for name in (f"photos/{('cats', 'dogs')[number % 2]}/{number}.png", f"captions/Images/{number}.jpg"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            image.save(folder / name)
        described += [f"{number}.jpg,a {('red', 'blue')[number % 2]} square is on the left"]
    (folder / "captions/captions.txt").write_text("\n".join([*described, ""]))


def session() -> int:
    """Run the README's session without `cluster.sh down`, each command printed before it runs, and check its answer."""
    block = (ROOT / "README.md").read_text().partition("<!-- session -->\n```bash\n")[2].partition("```")[0]
    script = "\n".join(["set -ex", *block.splitlines()[:-1]])
    said = []
    with subprocess.Popen(["bash", "-c", script], cwd=ROOT, stdout=-1, stderr=-2, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            said.append(line)
    answer = "".join(said).partition("+ hvdtrain results scaling")[2]
    titles = re.findall(r"^10 Mbit/s, (?:allreduce|powersgd:rank=4), torch", answer, re.MULTILINE)
    answered = len(titles) == 2 and re.search(r"^ +2  2  .+ \([\d.]+-[\d.]+\)", answer, re.MULTILINE)
    if not process.returncode and not answered:
        print("no table for each strategy, with a speed-up and its interval", file=sys.stderr)
    return process.returncode or (0 if answered else 1)


def main(folder: Path) -> int:
    prepare(folder)
    for command, codes in COMMANDS.items():
        start = time.monotonic()
        done = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        print(f"{time.monotonic() - start:5.1f} s  {command}", flush=True)
        if done.returncode not in (0, *codes) or PACKAGE.search(done.stderr):
            print(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}", file=sys.stderr)
            return 1
    return session() if "--session" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
