"""The example of docs/fine_tuning.md as tests follow it, and the same run of transformers' model in a plain loop."""

import contextlib
import json
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers

from stepgraph import cli
from stepgraph.train.data import PackedLoader, open_data

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fine_tuning.md").read_text(encoding="utf-8")
STEPS = 8


def make(folder):
    """Run the page's script in ``folder``: conversations, and a model with its tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path(str(ROOT / "examples" / "chats" / "make.py"))


def tune(folder, *options):
    """Run the page's command in ``folder`` with fewer steps; of two values of an option the last holds."""
    (command,) = re.findall(r"^stepgraph (train .*--out tuned.*)$", PAGE, re.MULTILINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with pytest.raises(SystemExit) as stop:
            cli.main([*command.split(), "--steps", str(STEPS), *options])
    assert stop.value.code == 0


def records(run, name):
    """What the run in the folder ``run`` recorded as ``name``, in order."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


class PlainLoop:
    """The run of `tune` in a loop of transformers' own model, with torch's AdamW, by ``--precision`` on ``device``.

    In ``bf16`` the optimizer has fp32 copies of the parameters, as that precision has in stepgraph.
    """

    def __init__(self, folder, device="cpu", precision="fp32"):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.model = transformers.LlamaForCausalLM.from_pretrained(folder / "base", dtype=dtype).to(device)
        data = open_data(str(folder / "chat.jsonl"), str(folder / "base" / "tokenizer.json"))
        self.batches = PackedLoader(data.source, data.tokenizer, batch_size=4, seq_len=128, positions=True)
        self.device, self.precision = device, precision
        self.params = list(self.model.parameters())
        self.held = [p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float()) for p in self.params]
        self.optimizer = torch.optim.AdamW(self.held, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)

    def batch(self):
        return {name: tensor.to(self.device) for name, tensor in next(self.batches).items()}

    def loss(self, batch, model=None):
        """Of ``model``, or the one in training, on a batch."""
        model, autocast = model or self.model, self.precision == "bf16-autocast"
        with torch.autocast(self.device, torch.bfloat16) if autocast else contextlib.nullcontext():
            seen = apart(batch["positions"])
            logits = model(batch["tokens"], seen, position_ids=batch["positions"]).logits
            return model.loss_function(logits, None, vocab_size=320, shift_labels=batch["targets"])

    def step(self, lr):
        """One update on the next batch; its loss."""
        loss = self.loss(self.batch())
        self.model.zero_grad()
        loss.backward()
        for held, param in zip(self.held, self.params, strict=True):
            held.grad = param.grad.float()
        torch.nn.utils.clip_grad_norm_(self.held, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        with torch.no_grad():
            for held, param in zip(self.held, self.params, strict=True):
                param.copy_(held)
        return loss.item()


def apart(positions):
    """Which tokens (B, 1, T, T) see which: those before them in their conversation."""
    number = (positions == 0).cumsum(1)
    return (number[:, None, :, None] == number[:, None, None, :]).tril()
