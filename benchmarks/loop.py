"""What a long run takes and waits for: memory and open files of 1,500 steps, saves in the background, data.

A tiny Llama 3 on a CPU, `stepgraph train`. ``memory_mib``, ``files``: of its process after that many steps. ``save_s``:
how long the loop waited for each save. ``data_ms``: for each batch.

``paced``: batches of 8 x 2048 tokens asked for at 500,000 tokens/s, as a host of eight fast GPUs asks, for a minute, so
that a second buffer of rows is begun; ``first_ms``: the wait for the first batch, ``wait_ms``: for each later one. The
text is the standard library's sources 16 times over, in eight files: ``files`` are read whole, into a cache of tokens
that is still written at first, ``again`` from that cache, ``hf-stream`` as it comes (`--data hf-stream:FOLDER`). The
tokenizer is ``bytes``, or BPE of 32,768 tokens; ``tokenizer_tokens_per_s``: what it makes of this text by itself.

    python benchmarks/loop.py [--steps 1500] [--json FILE]
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from stepgraph.config.environment import environment
from stepgraph.train.data import PackedLoader, open_data

ROOT = Path(__file__).parents[1]
SIZES = {"dim": 64, "n-layers": 2, "n-heads": 4, "n-kv-heads": 2, "ffn-dim": 128}
TOKENS_PER_S, BATCH, SEQ_LEN, SECONDS = 500_000, 8, 2048, 60
FILES, COPIES, VOCABULARY = 8, 16, 32_768


def run(steps: int, folder: Path) -> dict[str, Any]:
    """One run, watched from outside."""
    sizes = [word for name, size in SIZES.items() for word in (f"--model.{name}", size)]
    words = ["llama3-debug", *sizes, "--seq-len", 64, "--batch-size", 4, "--device", "cpu", "--steps", steps]
    words += ["--warmup-steps", 2, "--val-every", 100, "--log-every", 10, "--save", "behind", "--checkpoint-every", 50]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "stepgraph", "train", *map(str, words), "--out", str(folder / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    memory, files, said = {}, {}, []
    for line in process.stdout:
        said.append(line)
        if found := re.match(r"step (\d+)/", line):
            step = int(found[1])
            if step % (steps // 15) == 0 and step < steps:
                status = Path(f"/proc/{process.pid}/status").read_text()
                memory[step] = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024
                files[step] = len(os.listdir(f"/proc/{process.pid}/fd"))
    if process.wait():
        raise RuntimeError("".join(said)[-4000:])
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    waits = [record["data_ms"] for record in records if "data_ms" in record]
    return {
        "steps": steps,
        "memory_mib": memory,
        "files": files,
        "save_s": [float(s) for s in re.findall(r"the run waited ([\d.]+) s", "".join(said))],
        "data_ms": {"median": statistics.median(waits), "largest": max(waits), "batches": len(waits)},
    }


def text(folder: Path) -> None:
    """The text in ``folder``, and a tokenizer made of it."""
    texts = [text.decode(errors="replace") for text in open_data("stdlib").source.texts(None)] * COPIES
    for number in range(FILES):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[number::FILES])
        (folder / f"train-{number}.jsonl").write_text("".join(lines))
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=letters, show_progress=False
    )
    bpe.train_from_iterator(texts[: len(texts) // COPIES], trainer)
    bpe.save(str(folder / "bpe.json"))


def paced(name: str, data: str, tokenizer: str, cache: Path) -> dict[str, Any]:
    """How long batches are waited for at a given rate, from the first on."""
    bundle = open_data(data, tokenizer)
    texts = list(itertools.islice(bundle.source.texts("val"), 400))
    start = time.perf_counter()
    tokens = sum(map(len, bundle.tokenizer.encode_batch(texts)))
    rate = tokens / (time.perf_counter() - start)
    loader = PackedLoader(bundle.source, bundle.tokenizer, batch_size=BATCH, seq_len=SEQ_LEN, cache=cache)
    each = BATCH * SEQ_LEN / TOKENS_PER_S
    waits, due = [], time.perf_counter()
    for _ in range(round(SECONDS / each)):
        start = time.perf_counter()
        next(loader)
        waits.append((time.perf_counter() - start) * 1e3)
        due = max(due, start) + each
        time.sleep(max(0.0, due - time.perf_counter()))
    loader.tokens.close()
    rest = {"median": statistics.median(waits[1:]), "largest": max(waits[1:]), "batches": len(waits) - 1}
    return {
        "data": name,
        "tokenizer": Path(tokenizer).stem,
        "tokenizer_tokens_per_s": round(rate),
        "first_ms": waits[0],
        "wait_ms": rest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        text(root)
        record = {"run": run(options.steps, root), "tokens_per_s": TOKENS_PER_S, "batch": [BATCH, SEQ_LEN]}
        files, stream = f"{root}/train-*.jsonl", f"hf-stream:{root}"
        record["paced"] = [
            paced(name, data, tokenizer, root / "tokens")
            for tokenizer in ("bytes", str(root / "bpe.json"))
            for name, data in (("files", files), ("again", files), ("hf-stream", stream))
        ]
    print(json.dumps(record, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment(), **record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
