"""`transformers.Trainer` with the whole step in one graph, on a file of chats.

CPU, a few seconds:  python examples/graph_trainer.py
GPU, a real model:   python examples/graph_trainer.py --model FOLDER --data chats.jsonl --bf16 --length 1024

Each line of the file is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from stepgraph.integrations import GraphTrainer


class Letters:
    """A tokenizer of bytes for the demonstration model: one token per byte, 256 ends a turn."""

    pad_token_id = 256

    def ids(self, text: str) -> list[int]:
        return [*text.encode(), 256]


def rows_of(chats: list[list[dict[str, str]]], encode: Any, length: int) -> list[dict[str, list[int]]]:
    """Rows of ``length`` tokens; the loss is on the assistant's tokens alone (all other labels are -100)."""
    rows = []
    for chat in chats:
        ids: list[int] = []
        labels: list[int] = []
        for message in chat:
            turn = encode(f"{message['role']}: {message['content']}")
            ids += turn
            labels += turn if message["role"] == "assistant" else [-100] * len(turn)
        ids, labels = ids[:length], labels[:length]
        pad = length - len(ids)
        rows.append({"input_ids": ids + [0] * pad, "labels": labels + [-100] * pad})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face causal model; default: a tiny Llama")
    parser.add_argument("--data", type=Path, help="JSON lines with messages; default: sums of two numbers")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model)
        encode = transformers.AutoTokenizer.from_pretrained(args.model).encode
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=257, **sizes))
        encode = Letters().ids
    if args.data:
        chats = [json.loads(line)["messages"] for line in args.data.read_text().splitlines()]
    else:
        sums = [(a, b) for a in range(10) for b in range(10)]
        chats = [
            [{"role": "user", "content": f"{a} plus {b}?"}, {"role": "assistant", "content": str(a + b)}]
            for a, b in sums
        ]

    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            output_dir=out,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=5,
            bf16=args.bf16,
            report_to=[],
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )
        rows = rows_of(chats, encode, args.length)
        # passes="default" adds the passes that round differently, Inductor among them: what to use on a GPU.
        passes = "default" if torch.cuda.is_available() else "exact"
        GraphTrainer(model=model, args=arguments, train_dataset=rows, passes=passes).train()


if __name__ == "__main__":
    main()
