"""A PyTorch script that continues when a host is lost: Horovod's elastic API.

launch/mpirun.sh --elastic -H 127.0.0.1:1,127.0.0.2:1,127.0.0.3:1 python examples/elastic.py
"""

import torch

import hvdtrain.data
import hvdtrain.torch as hvd

hvd.init()
digits = hvdtrain.data.load("digits", (8, 8))
train_set, test_set = (
    (torch.from_numpy(part.samples).flatten(1), torch.from_numpy(part.labels)) for part in (digits.train, digits.test)
)
sampler = hvd.elastic.ElasticSampler(train_set[0])
batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train_set), batch_size=32, sampler=sampler)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())


@hvd.elastic.run
def train(state):
    while state.epoch < 8:
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            hvd.log(loss=loss.item(), samples=len(x))
            state.sampler.record_batch(number, len(x))
            if number % 8 == 7:
                state.commit()  # a loss takes all ranks back to this point
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


train(hvd.elastic.TorchState(net, optimizer, sampler=sampler, epoch=0))
accuracy = (net(test_set[0]).argmax(1) == test_set[1]).float().mean().item()
hvd.log(test_accuracy=accuracy)
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.3f} on {hvd.size()} ranks")
