"""A process like a rank, which a real sampler watches while it carries out the commands that follow the folder.

Prints its own measurements as a JSON object. Its exit code is 0 if the monitors did not disturb it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain import monitors

FOLDER = Path(sys.argv[1])
BUSY = "import time\nwhile time.process_time() < 0.6: pass"
held = []


def counters():
    """This process's CPU seconds with its children's, its memory; bytes of NICs and disks: read without psutil."""
    nics = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, figures = line.partition(":")
        nics[name.strip()] = int(figures.split()[0])
    disks = {line.split()[2]: 512 * int(line.split()[9]) for line in Path("/proc/diskstats").read_text().splitlines()}
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    times = {"cpu_s": sum(os.times()[:4]), "unix_s": time.time(), "s": time.monotonic()}
    return {**times, "rss_bytes": rss, "nics": nics, "disks": disks}


def children():
    """{pid: state letter}"""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


def do(word):
    name, _, value = word.partition("=")
    if name == "sleep":
        time.sleep(float(value))
    elif name == "samples":  # more of them are recorded; all but the first began after the commands before
        (path,) = FOLDER.glob("monitors/*.jsonl")
        wanted = path.read_bytes().count(b"\n") + int(value)
        while path.read_bytes().count(b"\n") < wanted:
            time.sleep(0.01)
    elif name == "busy":
        began = time.process_time()
        while time.process_time() - began < float(value):
            pass
    elif name == "child":  # in a process below a process, both waited for
        program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
        subprocess.run([sys.executable, "-c", program], check=True)
    elif name == "allocate":
        held.append(b"x" * int(value))
    elif name == "write":
        with (FOLDER / "data").open("wb") as stream:
            stream.write(os.urandom(int(value)))
            os.fsync(stream.fileno())
    elif name == "kill":  # the sampler
        os.kill(int(next(iter(children()))), int(value))
        time.sleep(0.1)
    elif name == "impatient":
        monitors.END_S = 0.3
    elif name == "replace":  # FILE TEXT
        file, _, text = value.partition(" ")
        Path(file + ".new").write_text(text)
        Path(file + ".new").replace(file)
    elif name == "run":
        subprocess.run(value.split(), check=True)
    elif name == "fork":  # a child that holds all our pipes open
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    elif name == "die":
        print(json.dumps({"children": children(), "unix_s": time.time()}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


options = json.loads(os.environ.get("MONITORED", "{}"))
names = options.pop("names", "power,resources")
ranks = [monitors.describe_rank(0, "cpu") | rank for rank in options.pop("ranks", [{}])]
before = counters()
monitor = monitors.Monitor(names, FOLDER, **({"interval_s": 0.1, "idle_s": 0, "ranks": ranks} | options))
ready = counters()
with monitor:
    began = counters()
    for word in sys.argv[2:]:
        do(word)
    ended, seen = counters(), children()
after = counters()
facts = {"before": before, "ready": ready, "began": began, "ended": ended, "after": after, "children": seen}
print(json.dumps(facts | {"left": children(), "nothing": monitor.unavailable}))
