"""Fine-tune a small GPT with LoRA: transformers' Trainer and peft, without a line of hvdtrain.

    torchrun --nproc-per-node 2 -m hvdtrain.ddp --strategy fast examples/hf_lora.py

The model has random weights and reads bytes, so nothing is downloaded. Its text are the pages of this repository.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--width", type=int, default=384, help="numbers for each token")
parser.add_argument("--length", type=int, default=256, help="bytes of a sample")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--output", default="results/hf_lora")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

root = Path(__file__).resolve().parents[1]
text = b"".join(page.read_bytes() for page in sorted([root / "README.md", *root.glob("docs/*/*.md")]))
rows = torch.tensor(list(text)).unfold(0, options.length, options.length)
samples = [{"input_ids": row, "labels": row} for row in rows]

torch.manual_seed(0)  # the ranks begin with the same adapters
config = GPT2Config(
    vocab_size=256,
    n_positions=options.length,
    n_embd=options.width,
    n_layer=options.layers,
    n_head=options.width // 64,
    bos_token_id=0,
    eos_token_id=0,
)
lora = LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
arguments = TrainingArguments(
    output_dir=options.output,
    max_steps=options.steps,
    per_device_train_batch_size=options.batch,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    max_grad_norm=1.0,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    eval_strategy="steps",
    eval_steps=options.steps // 2,
    save_steps=options.steps // 2,
    load_best_model_at_end=True,
    report_to="none",
)
model = get_peft_model(GPT2LMHeadModel(config), lora)
trainer = Trainer(model=model, args=arguments, train_dataset=samples[:-32], eval_dataset=samples[-32:])
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model()
