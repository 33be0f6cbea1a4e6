"""A script that somebody may have, for `make bench-trainers`: a small GPT, trained in full or by LoRA, by transformers'
Trainer, or by Accelerate with DistributedDataParallel's PowerSGD hook or with LocalSGD. It has no line of hvdtrain.

Each rank prints PARAMETERS and their number, after each step STEP, a time and a number, and LOSS at the end.
"""

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DDPCommunicationHookType
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--full", action="store_true", help="train all weights, without LoRA")
parser.add_argument("--loop", default="trainer", choices=["trainer", "powersgd", "localsgd"])
parser.add_argument("--steps", type=int, default=10_000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--layers", type=int, default=13)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--evaluated", type=int, default=64, help="held-out samples")
options = parser.parse_args()

root = Path(__file__).resolve().parents[2]
text = b"".join(page.read_bytes() for page in sorted([root / "README.md", *root.glob("docs/*/*.md")]))
rows = torch.tensor(list(text)).unfold(0, options.length, options.length)
samples = [{"input_ids": row, "labels": row} for row in rows]
held_out, samples = samples[::9][: options.evaluated], [each for at, each in enumerate(samples) if at % 9]

torch.manual_seed(options.seed)
config = GPT2Config(
    vocab_size=256,
    n_positions=options.length,
    n_embd=options.width,
    n_layer=options.layers,
    n_head=options.width // 64,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(config)
if not options.full:
    names = ["c_attn", "c_proj", "c_fc"]
    model = get_peft_model(model, LoraConfig(r=8, target_modules=names, fan_in_fan_out=True, task_type="CAUSAL_LM"))
print(f"\nPARAMETERS {sum(each.numel() for each in model.parameters() if each.requires_grad)}", flush=True)


def ended(step: int) -> None:
    print(f"\nSTEP {time.monotonic():.3f} {step}", flush=True)


if options.loop == "trainer":

    class Log(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ended(state.global_step)

    arguments = TrainingArguments(
        output_dir="results/trainer_gpt",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=16,
        learning_rate=options.lr,
        warmup_steps=10,
        seed=options.seed,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=held_out, callbacks=[Log()])
    trainer.train()
    print(f"\nLOSS {trainer.evaluate()['eval_loss']:.5f}", flush=True)
else:
    hook = DDPCommunicationHookType.POWER_SGD if options.loop == "powersgd" else DDPCommunicationHookType.NO
    state = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3}
    # With several buckets the hook's all-reduces on Gloo can meet in another order on each rank, and hang.
    ddp = DistributedDataParallelKwargs(bucket_cap_mb=100, comm_hook=hook, comm_state_option=state)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp])
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    loader = torch.utils.data.DataLoader(samples, batch_size=options.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = (batch for _ in iter(int, 1) for batch in loader)
    with LocalSGD(accelerator, model, local_sgd_steps=8, enabled=options.loop == "localsgd") as local_sgd:
        for step in range(1, options.steps + 1):
            accelerator.backward(model(**next(batches)).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            ended(step)
