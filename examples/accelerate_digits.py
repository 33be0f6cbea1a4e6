"""Train on scikit-learn's handwritten digits with Accelerate, without a line of hvdtrain.

torchrun --nproc-per-node 2 -m hvdtrain.ddp --strategy fast examples/accelerate_digits.py
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--save", help="folder for the state of the training")
options = parser.parse_args()

images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images).float() / 16, torch.tensor(digits)
samples = torch.utils.data.TensorDataset(images[:1500], digits[:1500])

torch.manual_seed(0)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(options.epochs):
    model.train()
    for image, digit in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(image), digit))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
accelerator.wait_for_everyone()
model.eval()
with torch.no_grad():
    right = (model(images[1500:].to(accelerator.device)).argmax(1).cpu() == digits[1500:]).float().mean()
print(f"rank {accelerator.process_index}: accuracy {right:.3f}", flush=True)
if options.save:
    accelerator.save_state(options.save)
