"""A script with Horovod's elastic API, whose ranks kill themselves. Each rank that is left writes FOLDER/RANK.json.

    launch/mpirun.sh --elastic -H 127.0.0.1:1,127.0.0.2:1,... python own_elastic.py FOLDER KILLS [ARGUMENTS]

KILLS is a JSON list of [rank, step, n]: from that step on, the rank dies before its n-th message, once. ARGUMENTS is a
JSON object of arguments of DistributedOptimizer, and sleep_s, the time that each step takes longer while a rank is
missing. With late_s, rank 0 dies when it begins, and the others begin these seconds later. Used by test_own_elastic.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hvdtrain.torch as hvd
from hvdtrain.comm.backends import tcp
from hvdtrain.comm.elastic import ElasticCommunicator

SAMPLES, BATCH, EPOCHS = 72, 3, 3

folder, kills = Path(sys.argv[1]), json.loads(sys.argv[2])
arguments: dict[str, Any] = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
sleep_s, late_s = (arguments.pop(name, 0) for name in ("sleep_s", "late_s"))
if arguments.pop("fp16", False):
    arguments["compression"] = hvd.Compression.fp16
hvd.init()
first_rank = int(os.environ.get("HVDTRAIN_ELASTIC_RANK", hvd.rank()))
torch.manual_seed(hvd.rank())  # the state makes the ranks equal
features = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(features, features.square().sum(1) > 5, torch.arange(SAMPLES))
sampler = hvd.elastic.ElasticSampler(data, seed=4)
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 40), torch.nn.LayerNorm(40), torch.nn.ReLU(), torch.nn.Linear(40, 500), torch.nn.Linear(500, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)
schedule.optimizer = optimizer
state = hvd.elastic.TorchState(
    model, optimizer, sampler=sampler, schedule=schedule, epoch=0, steps=0, seen=[[] for _ in range(EPOCHS)]
)
committed, resets = [0], []


def note_reset() -> None:
    resets.append([state.steps, committed[-1], hvd.rank(), hvd.size()])


def die_in_message(number: int) -> None:
    swap, count = tcp.swap, 0

    def deadly(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count >= number:
            os.kill(os.getpid(), signal.SIGKILL)
        return swap(*arguments)

    tcp.swap = deadly


def begin_apart(self: Any, run: Any) -> None:
    time.sleep(late_s * (first_rank > 0))
    begin(self, run)
    if first_rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


if late_s:
    begin, ElasticCommunicator.begin = ElasticCommunicator.begin, begin_apart


@hvd.elastic.run
def train(state: Any) -> str:
    while state.epoch < EPOCHS:
        for batch, (x, y, index) in enumerate(loader):
            if hvd.size() < int(os.environ.get("HVDTRAIN_ELASTIC_SIZE", "0")):
                time.sleep(sleep_s)
            died = folder / f"{first_rank}.died"
            for kill in [kill for kill in kills if kill[0] == first_rank and kill[1] <= state.steps]:
                if not died.exists():
                    died.touch()
                    die_in_message(kill[2])
            state.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(state.model(x), y.long()).backward()
            state.optimizer.step()
            state.schedule.step()
            state.seen[state.epoch] += hvd.allgather(index, name="index").tolist()
            state.sampler.record_batch(batch, len(x))
            state.steps += 1
            if state.steps % 2 == 0:
                state.commit()
                committed.append(state.steps)
            else:
                state.check_host_updates()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
        committed.append(state.steps)
    return "done"


state.register_reset_callbacks([note_reset])
assert train(state) == "done"
for parameter in model.parameters():
    mean = hvd.allreduce(parameter.data, name="mean")
    assert torch.allclose(mean, parameter.data, atol=1e-6), "calls after the function use the present ranks"
digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.parameters())).hexdigest()
report = {"digests": hvd.allgather_object(digest, name="digests"), "resets": resets, "seen": state.seen}
report |= {"steps": state.steps, "lr": schedule.get_last_lr(), "rank": hvd.rank(), "size": hvd.size()}
(folder / f"{first_rank}.json").write_text(json.dumps(report))
hvd.barrier()
