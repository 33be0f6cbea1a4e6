"""A Horovod script with the import changed: an MLP of a million parameters learns handwritten digits.

HVDTRAIN_STRATEGY=balanced horovodrun -np 2 -H localhost:2 python examples/own_script.py
"""

import sys
import time

import torch

import hvdtrain.data
import hvdtrain.torch as hvd

hvd.init()
torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
digits = hvdtrain.data.load("digits", (8, 8))
images, labels = torch.from_numpy(digits.train.samples).flatten(1), torch.from_numpy(digits.train.labels)
test_images, test_labels = torch.from_numpy(digits.test.samples).flatten(1), torch.from_numpy(digits.test.labels)
shard = slice(hvd.rank(), None, hvd.size())  # this rank's shard of the training data
train = torch.utils.data.TensorDataset(images[shard], labels[shard])
batches = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
net = torch.nn.Sequential(
    *(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 900), torch.nn.ReLU(), torch.nn.Linear(900, 10))
)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), net.named_parameters())
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
began = time.perf_counter()
for epoch in range(5):
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        hvd.log(loss=loss.item(), samples=len(x))  # for the run's records
    optimizer.synchronize_weights()  # for strategies that average weights
    accuracy = (net(test_images).argmax(1) == test_labels).float().mean().item()
    hvd.log(epoch=epoch, accuracy=accuracy)
if hvd.rank() == 0:
    print(f"{accuracy:.4f} accuracy after {time.perf_counter() - began:.1f} s of training")
assert accuracy > 0.85
