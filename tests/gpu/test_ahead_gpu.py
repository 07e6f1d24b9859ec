"""Our kernels are compiled while Inductor compiles: the first step on a GPU finds them all on disk."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch, transformers, triton
import stepgraph

kind, size = sys.argv[1], dict(vocab_size=5000, hidden_size=512, num_hidden_layers=2, num_attention_heads=8)
torch.manual_seed(0)
if kind == "moe":
    config = transformers.Qwen3MoeConfig(**size, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2,
                                         num_key_value_heads=4, head_dim=64, norm_topk_prob=True)
elif kind == "gpt2":
    config = transformers.GPT2Config(vocab_size=5001, n_embd=512, n_layer=2, n_head=8)
else:
    config = transformers.LlamaConfig(**size, intermediate_size=1024, num_key_value_heads=4)
model = transformers.AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
ids = torch.randint(5000, (4, 256), device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
loss = lambda model, batch: model(input_ids=batch, labels=batch, use_cache=False).loss
step = stepgraph.capture(model, loss, ids, optimizer, max_grad_norm=1.0)
(report,) = [r for r in step.report if r.name == "inductor"]
events = []


def listener(src, cache_hit, **others):
    events.append((src.fn.__module__, src.fn.__name__, cache_hit))


triton.knobs.compilation.listener = listener
value = step(ids).item()
print(json.dumps({"notes": report.notes, "events": events, "loss": value}))
"""


@pytest.mark.parametrize("kind", ["moe", "gpt2", "llama"])
def test_the_first_step_compiles_none_of_our_kernels(kind, tmp_path):
    pytest.importorskip("transformers")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_CACHE_DIR"} | caches
    done = subprocess.run([sys.executable, program, kind], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert not [note for note in result["notes"] if "not compiled ahead" in note]
    assert any("of our own kernels compiled" in note for note in result["notes"])
    ours = {name: hit for module, name, hit in result["events"] if module.startswith("stepgraph.")}
    # Sums that Inductor's own code hands over are not nodes of the graph.
    assert ours and all(hit for name, hit in ours.items() if name != "add_slots_kernel"), ours
