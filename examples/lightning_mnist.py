"""Train on scikit-learn's handwritten digits with Lightning and strategy="ddp", without a line of hvdtrain.

torchrun --nproc-per-node 2 -m hvdtrain.ddp --strategy balanced examples/lightning_mnist.py
"""

import argparse
import os

import lightning
import torch
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--output", default="results/lightning_mnist")
options = parser.parse_args()


class Digits(lightning.LightningModule):
    """A perceptron for images of 8x8."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, index):
        right = (self.layers(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


images, digits = load_digits(return_X_y=True)
samples = torch.utils.data.TensorDataset(torch.tensor(images).float() / 16, torch.tensor(digits))
train, validation = torch.utils.data.random_split(samples, [1500, 297], torch.Generator().manual_seed(0))

lightning.seed_everything(0)  # the ranks begin with the same weights
trainer = lightning.Trainer(
    strategy="ddp",
    accelerator="auto",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    max_epochs=options.epochs,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    default_root_dir=options.output,
    logger=False,
)
loaders = [torch.utils.data.DataLoader(part, batch_size=16, shuffle=part is train) for part in (train, validation)]
trainer.fit(Digits(), *loaders)
print(f"rank {trainer.global_rank}: accuracy {float(trainer.callback_metrics['accuracy']):.3f}")
