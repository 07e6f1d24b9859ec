"""LoRA adapters by peft, trained in one graph and saved in peft's own files.

CPU, a few seconds:  python examples/lora.py
GPU, a real model:   python examples/lora.py --model FOLDER --device cuda --steps 200 --length 2048
"""

import argparse
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from torch import nn

import stepgraph


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own mean cross entropy."""
    return model(input_ids=batch["tokens"], labels=batch["tokens"]).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face causal model; default: a tiny Llama")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))
    adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, adapters).to(args.device)
    model.print_trainable_parameters()

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    batch = {"tokens": torch.randint(256, (4, args.length), device=args.device)}
    passes = "exact" if args.device == "cpu" else "default"
    step = stepgraph.capture(model, loss_fn, batch, optimizer, max_grad_norm=1.0, passes=passes)
    for number in range(1, args.steps + 1):
        loss = step(batch)
        if number in (1, args.steps):
            print(f"step {number}: loss {loss.item():.4f}")

    with tempfile.TemporaryDirectory() as out:
        model.save_pretrained(out)  # the step updates the module's own tensors: nothing to convert
        print("saved", sorted(file.name for file in Path(out).iterdir()))


if __name__ == "__main__":
    main()
