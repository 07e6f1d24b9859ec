"""Examples of many lengths without padding: packed rows of one length, one capture for all of them.

CPU, a few seconds:  python examples/packing.py
GPU, a real model:   python examples/packing.py --model FOLDER --bf16 --tokens 16384 --steps 200
"""

import argparse
import tempfile
from pathlib import Path

import torch
import transformers

from stepgraph.integrations import GraphTrainer, PackToBudget, attend_within_documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face causal model; default: a tiny Qwen3")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.Qwen3Config(vocab_size=256, num_key_value_heads=2, head_dim=16, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
    if torch.cuda.is_available():
        model.cuda()
    attend_within_documents(model)  # refuses, in one line, a model that would mix packed documents

    lengths = torch.randint(5, 100, (200,)).tolist()  # your tokenized examples: {"input_ids": [...], "labels": [...]}
    examples = [{"input_ids": torch.randint(256, (n,)).tolist()} for n in lengths]
    pack = PackToBudget(args.tokens, max_documents=32, max_length=128, longer="cut")
    rows = pack.dataset(examples)
    print(f"{len(examples)} examples in {len(rows)} rows of {args.tokens} tokens, {rows.share:.0%} of them not padding")

    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            output_dir=out,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            logging_steps=5,
            bf16=args.bf16,
            report_to=[],
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )
        passes = "default" if torch.cuda.is_available() else "exact"
        GraphTrainer(model=model, args=arguments, train_dataset=rows, data_collator=pack, passes=passes).train()


if __name__ == "__main__":
    main()
