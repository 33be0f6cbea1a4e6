"""A byte GPT of 0.67 M parameters on the King James Bible, in plain PyTorch without a line of hvdtrain.

`--method` joins common remedies for a slow network with `+`, such as accumulate:4+fp16: accumulate:K, bucket:MB, the
hooks fp16 and powersgd:RANK, and local steps by postlocal:H (PyTorch), accelerate:H or diloco:H (torchft).
diloco:H/D averages four parts of the model in turn, each during D steps. With horovod, mpirun or horovodrun starts the
ranks instead of torchrun. A step is a batch of each rank, whatever the method. Rank 0 prints a JSON object, whose curve
has [step, held-out loss, seconds of training] of each evaluation.
"""

import argparse
import contextlib
import copy
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

CONTEXT, WIDTH, LAYERS, HELD_OUT = 64, 128, 3, 256
METHODS = (
    "ddp",
    "bucket:N",
    "accumulate:N",
    "fp16",
    "powersgd:N",
    "postlocal:N",
    "accelerate:N",
    "diloco:N",
    "diloco:N/N",
    "horovod",
)
EXCHANGES = {"fp16", "powersgd", "postlocal", "accelerate", "diloco", "horovod"}
"""Methods of which a run has one, or horovod+fp16"""
RECENT = 8
"""The weights of update i count as i to the power of 8 in the mean that is evaluated: half of it is the last 8 %"""


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = torch.nn.Embedding(256, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, torch.nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 256)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, rows):
        rows = rows.long()
        hidden = self.bytes(rows[:, :-1]) + self.places.weight
        logits = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def bible():
    try:
        found = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], capture_output=True, check=True).stdout
    except FileNotFoundError:
        sys.exit("byte_gpt: no command bible; hint: apt-get install bible-kjv-text bible-kjv")
    return re.sub(rb"(?m)^\S+ ", b"", found)


def rows_of(text):
    """The text's rows for training, which may overlap, and held-out rows from its last twentieth."""
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    training = len(text) * 19 // 20
    rows = text[training:].unfold(0, CONTEXT + 1, CONTEXT + 1)
    return text[:training].unfold(0, CONTEXT + 1, 1), rows[torch.linspace(0, len(rows) - 1, HELD_OUT).long()]


class Task:
    """The model, its data and its optimizer. fashion_resnet.py has another task."""

    clip = 1.0
    """Largest norm of the gradients"""

    def __init__(self, options):
        torch.manual_seed(0)
        self.model = GPT()
        self.training, self.held_out = rows_of(options.text.read_bytes() if options.text else bible())

    def optimizer(self, lr):
        return torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.98), fused=True)

    def parts(self):
        rest = [self.model.bytes, self.model.places, self.model.layers.norm, self.model.head]
        return [*self.model.layers.layers, torch.nn.ModuleList(rest)]

    def batch(self, size, random):
        return self.training[torch.randint(len(self.training), (size,), generator=random)]

    def loss(self, model, rows):
        return model(rows)

    def held_out_loss(self, model, rank, ranks):
        """Return this rank's share of the loss; the sum over all ranks is the mean over the held-out rows."""
        rows = self.held_out[rank::ranks]
        return model(rows) * len(rows) / len(self.held_out)


def diloco(model, parts, optimizer, every, delay):
    """torchft's DiLoCo with a tuned outer step, which averages in hooks of the optimizer. Each rank is a replica group.

    Returns all servers and clients: if one is garbage-collected, the other ranks wait for it.
    """
    try:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
    except ModuleNotFoundError:
        sys.exit("byte_gpt: --method diloco needs torchft; hint: pip install torchft==0.2.0")
    ranks, host = dist.get_world_size(), socket.gethostname()
    lighthouse = LighthouseServer("[::]:0", min_replicas=ranks) if dist.get_rank() == 0 else None
    dist.broadcast_object_list(address := [lighthouse and lighthouse.address()])
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(),
        model.load_state_dict,
        model.state_dict,
        ranks,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=address[0],
        init_sync=False,
    )
    lr = 0.7 if every < 16 else 0.9
    outer = [torch.optim.SGD(each.parameters(), lr=lr, momentum=0.6, nesterov=True) for each in parts]
    averager = DiLoCo(manager, parts, optimizer, outer, every, fragment_sync_delay=delay)
    return averager.__enter__(), manager, lighthouse, store


def sent_bytes():
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(words[9]) for words in lines if words[0] != "lo:")


def main(task, about):
    train(task, about)
    # Here DDP is gone. Its destructor, if it were the last to hold the group, could deadlock with a thread of Gloo.
    dist.destroy_process_group()


def train(task, about):
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--method", default="ddp")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=16, help="steps with a smaller learning rate, and not averaged")
    parser.add_argument("--decay", action="store_true", help="let the learning rate fall to 0 at the last step")
    parser.add_argument("--evaluate", type=int, default=0, help="steps between evaluations (0: none)")
    parser.add_argument("--target", type=float, default=0.0, help="end at this held-out loss")
    parser.add_argument("--text", type=Path, help="a file to train on (default: the Bible)")
    parser.add_argument("--start", type=Path, help="weights to begin with")
    parser.add_argument("--save", help="write the averaged weights at the end")
    options = parser.parse_args()
    how = dict(part.partition(":")[::2] for part in options.method.split("+"))
    if any(re.sub(r"(?<=[:/])[1-9]\d*", "N", part) not in METHODS for part in options.method.split("+")):
        parser.error(f"--method {options.method} is unknown; hint: choose from {', '.join(METHODS)}")
    if len(chosen := EXCHANGES & how.keys()) > 1 and chosen != {"horovod", "fp16"}:
        parser.error(f"--method {options.method} cannot be combined; hint: use one of {', '.join(sorted(chosen))}")
    if missing := [path for path in (options.text, options.start) if path and not path.is_file()]:
        parser.error(f"{missing[0]}: no such file")
    every = int(how.get("accumulate", 1))
    task = task(options)
    model = task.model
    if options.start:
        model.load_state_dict(torch.load(options.start))
    if "horovod" in how:
        try:
            import horovod.torch as hvd
        except ModuleNotFoundError:
            sys.exit("byte_gpt: --method horovod needs Horovod; hint: make setup installs it")
        hvd.init()
        dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())
    else:
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = torch.Generator().manual_seed(1_000 * options.seed + rank)
    evaluated, parameters = copy.deepcopy(model), [*model.parameters()]
    recent, updates = [each.detach().clone() for each in parameters], 0
    optimizer = task.optimizer(options.lr)
    ddp, no_sync, averager = model, contextlib.nullcontext, None
    if "accelerate" in how:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        accelerator = Accelerator(cpu=True)
        ddp, optimizer = accelerator.prepare(model, optimizer)
        averager = LocalSGD(accelerator, ddp, int(how["accelerate"])).__enter__()
    elif "diloco" in how:
        period, delay = map(int, f"{how['diloco']}/0".split("/")[:2])
        averager = diloco(model, task.parts() if delay else [model], optimizer, period, delay)
    elif "horovod" in how:
        compression = hvd.Compression.fp16 if "fp16" in how else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, every)
    elif ranks > 1 or EXCHANGES & how.keys():
        # With several buckets the all-reduces of the PowerSGD hook on Gloo can meet in another order on each rank.
        largest = 100 if "powersgd" in how else how.get("bucket")
        ddp = DistributedDataParallel(model, bucket_cap_mb=largest and int(largest))
        no_sync = ddp.no_sync
    if "fp16" in how and "horovod" not in how:
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if "powersgd" in how:
        state = powerSGD_hook.PowerSGDState(None, int(how["powersgd"]), start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if "postlocal" in how:
        alone = dist.new_subgroups(group_size=1)[0]
        state = post_localSGD_hook.PostLocalSGDState(None, alone, options.warm_up, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(int(how["postlocal"]), warmup_steps=options.warm_up - 1)

    @torch.no_grad()
    def held_out_loss():
        """Of the mean of all ranks' recent weights."""
        mean = parameters_to_vector(recent)
        dist.all_reduce(mean)
        vector_to_parameters(mean / ranks, evaluated.parameters())
        dist.all_reduce(loss := task.held_out_loss(evaluated, rank, ranks))
        return loss.item()

    curve, seconds, sent, began = [], [0.0], 0, time.perf_counter()
    for step in range(1, options.steps + 1):
        lr = options.lr * min(step / options.warm_up, 1 - options.decay * step / options.steps)
        optimizer.param_groups[0]["lr"] = lr  # Muon's second group, the vectors, has no warm-up
        rows = task.batch(options.batch, batches)
        with no_sync() if step % every else contextlib.nullcontext():
            (task.loss(ddp, rows) / every).backward()
        if step % every == 0:
            if "horovod" in how:
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(parameters, task.clip)
            with optimizer.skip_synchronize() if "horovod" in how else contextlib.nullcontext():
                optimizer.step()
            if "accelerate" in how:
                averager.step()
            elif "postlocal" in how:  # it leaves out parameters without a gradient
                averager.average_parameters(parameters)
            optimizer.zero_grad()
        seconds.append(seconds[-1] + time.perf_counter() - began)
        sent = sent_bytes() if step == options.warm_up else sent
        if options.evaluate and step % every == 0:
            updates += 1
            torch._foreach_lerp_(recent, [each.data for each in parameters], (RECENT + 1) / (updates + RECENT))
            if step % options.evaluate == 0:
                curve.append([step, held_out_loss(), seconds[-1]])
                if curve[-1][1] <= options.target:
                    break
        began = time.perf_counter()
    counted = max(1, step - (first := min(step, options.warm_up)))
    found = {"curve": curve, "parameters": sum(each.numel() for each in parameters), "first_s": seconds[first]}
    found |= {"step_s": (seconds[-1] - seconds[first]) / counted, "step_bytes": (sent_bytes() - sent) / counted}
    if options.evaluate:  # how far the ranks' own weights are from their mean
        own = parameters_to_vector(parameters).detach()
        dist.all_reduce(mean := own / ranks)
        dist.all_reduce(apart := (own - mean).abs().max(), dist.ReduceOp.MAX)
        found["apart"] = apart.item()
    if rank == 0:
        if options.save:
            torch.save(evaluated.state_dict(), options.save)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Task, __doc__)
