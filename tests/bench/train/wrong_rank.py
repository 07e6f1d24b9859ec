"""A rank with two providers more: one whose updates are too large, one that fails on rank 1 while rank 0 waits."""

import contextlib
import dataclasses
import signal

import torch.distributed as dist

from stepgraph.bench.train import rank as train_rank
from stepgraph.bench.train.providers import PROVIDERS, Provider, stepgraph


@contextlib.contextmanager
def wrong(config, device, balanced):
    with stepgraph(dataclasses.replace(config, lr=100 * config.lr), device) as training:
        yield training


class Breaks:
    build_s, capture_s, compile_s, passes = 0.0, None, None, None

    def step(self, read=False):
        if dist.get_rank() == 1:
            raise RuntimeError("CUDA out of memory.\nTried to allocate everything\nand more")
        dist.barrier()


@contextlib.contextmanager
def breaks(config, device, balanced):
    dist.init_process_group("gloo")
    yield Breaks()


class Hangs(Breaks):
    def step(self, read=False):
        if dist.get_rank() == 1:
            signal.pause()
        dist.barrier()


@contextlib.contextmanager
def hangs(config, device, balanced):
    dist.init_process_group("gloo")
    yield Hangs()


PROVIDERS["hangs"] = Provider(hangs)
PROVIDERS["wrong"] = Provider(wrong)
PROVIDERS["breaks"] = Provider(breaks)

if __name__ == "__main__":
    train_rank.main()
