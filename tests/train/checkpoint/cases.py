"""What the checkpoint tests share: a model whose training touches all that a checkpoint holds; bitwise equality."""

import copy
import os
import random
import subprocess
import sys

import numpy as np
import torch
from torch import nn

#: Of a checkpoint, in one process.
FILES = [".metadata", "__0_0.distcp", "state.json", "rank-00000.json", "manifest.json"]


class Tiny(nn.Module):
    """Tied embedding, a mutated buffer (BatchNorm), dropout, an unused parameter: what a resume can get wrong."""

    def __init__(self, hidden: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 12, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.mix(self.embed(tokens)))
        return self.head(nn.functional.dropout(x, 0.2))


class MasterAdam(torch.optim.Optimizer):
    """An optimizer that owns fp32 master weights and moments, made at its first step, as mixed precision has."""

    def __init__(self, params, lr: float | torch.Tensor) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["master"] = p.detach().float().clone()
                    state["exp_avg"], state["exp_avg_sq"] = (
                        torch.zeros_like(state["master"]),
                        torch.zeros_like(p).float(),
                    )
                    state["note"] = "plain value"
                state["step"] += 1
                grad = p.grad.float()
                state["exp_avg"].lerp_(grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(grad * grad, 1 - group["betas"][1])
                state["master"] -= group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
                p.copy_(state["master"])


class Loader:
    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict:
        return {"position": self.position, "shards": ("a", "b"), "weights": torch.tensor([0.1, float("nan")])}

    def load_state_dict(self, state: dict) -> None:
        assert state["shards"] == ("a", "b")
        self.position = state["position"]


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw-amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True, foreach=True),
    "adamw-tensor-lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), foreach=False),
    "adamw-groups": lambda ps: torch.optim.AdamW(
        [{"params": ps[:2]}, {"params": ps[2:], "weight_decay": 0.0}], lr=0.01
    ),
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "master": lambda ps: MasterAdam(ps, 0.01),
    "master-tensor-lr": lambda ps: MasterAdam(ps, torch.tensor(0.01)),
}


def build(seed: int, optimizer: str = "adamw", hidden: int = 8, dtype: torch.dtype = torch.float32) -> dict:
    torch.manual_seed(seed)
    model = Tiny(hidden, dtype)
    return {
        "model": model,
        "optimizer": OPTIMIZERS[optimizer](list(model.parameters())),
        "loader": Loader(),
        "trainer": {"tokens": 2**60, "best": 0.1 + 0.2, "warmup": {"steps": 3}},
    }


def train(state: dict, steps: int) -> None:
    """Uses every RNG stream: data from numpy, dropout from torch, the learning rate from Python."""
    for _ in range(steps):
        tokens = torch.from_numpy(np.random.randint(0, 12, 16))
        for group in state["optimizer"].param_groups:
            lr = 0.01 * random.random()
            group["lr"].fill_(lr) if isinstance(group["lr"], torch.Tensor) else group.update(lr=lr)
        nn.functional.cross_entropy(state["model"](tokens).float(), tokens).backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["loader"].position += 16
        state["trainer"]["tokens"] += 16


def contents(state: dict) -> dict:
    """Everything a state holds, by torch's own state_dict: the oracle that the code under test does not use."""
    return copy.deepcopy(
        {
            "model": dict(state["model"].state_dict()),
            "optimizer": state["optimizer"].state_dict(),
            "loader": state["loader"].position,
            "trainer": state["trainer"],
        }
    )


def equal(a: object, b: object) -> bool:
    """Bitwise equality, of the types too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return same and torch.equal(*bits)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b or (a != a and b != b)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)


def script(file: str, *args: object) -> subprocess.Popen:
    """Start ``python file args`` as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, file, *map(str, args)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def succeed(*processes: subprocess.Popen) -> None:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)
