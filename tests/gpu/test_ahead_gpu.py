"""Our kernels are compiled while Inductor compiles, or a saved step is loaded: the first step finds them on disk."""

import json
import os
import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch, transformers, triton
import stepgraph

kind, saved = sys.argv[1:]
size = dict(vocab_size=5000, hidden_size=512, num_hidden_layers=2, num_attention_heads=8)
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
step = stepgraph.capture(model, loss, ids, optimizer, max_grad_norm=1.0, saved=saved or None)
(report,) = [r for r in step.report if r.name == "inductor"]
events, builds = [], []


def listener(src, cache_hit, **others):
    events.append((src.fn.__module__, src.fn.__name__, cache_hit))


triton.knobs.compilation.listener = listener
build = triton.runtime.build._build
triton.runtime.build._build = lambda *given: builds.append(given[0]) or build(*given)
losses = [step(ids).item() for _ in range(3)]
print(json.dumps({"notes": report.notes, "events": events, "losses": losses, "loaded": step.saved.loaded,
                  "saved": step.saved.notes, "builds": builds}))
"""


@pytest.fixture
def first_steps(tmp_path):
    """Runs ``PROGRAM``: (kind of model, folder of saved steps) -> what it prints. Triton's cache lies in Inductor's."""
    pytest.importorskip("transformers")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_CACHE_DIR"} | caches

    def run(kind, saved=""):
        command = [sys.executable, program, kind, str(saved)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def compiled_late(result):
    """Our kernels, and what calls one (C, by Triton 3.6), that steps compiled. Sums that Inductor's own code hands over
    are not nodes of the graph."""
    ours = [(name, hit) for module, name, hit in result["events"] if module.startswith("stepgraph.")]
    assert ours
    late = [name for name, hit in ours if not hit]
    callers = result["builds"][late.count("add_slots_kernel") :]
    return [name for name in late if name != "add_slots_kernel"] + callers


@pytest.mark.parametrize("kind", ["moe", "gpt2", "llama"])
def test_the_first_step_compiles_none_of_our_kernels(kind, first_steps):
    result = first_steps(kind)
    assert not [note for note in result["notes"] if "not compiled ahead" in note]
    assert any("of our own kernels compiled" in note for note in result["notes"])
    assert not compiled_late(result)


def test_a_loaded_step_finds_them_where_the_cache_is_empty(first_steps, tmp_path):
    """On another machine, GPU or after a restart that empties Triton's cache; and where that is full, it does not wait
    for another process."""
    made = first_steps("moe", tmp_path / "steps")
    for empty in (False, True):
        if empty:
            shutil.rmtree(tmp_path / "inductor")
        loaded = first_steps("moe", tmp_path / "steps")
        assert loaded["loaded"] and not compiled_late(loaded)
        # Attention's backward adds in any order; where the cache is empty, Inductor times its reductions again and may
        # choose another order of their sums.
        assert loaded["losses"][0] == (pytest.approx(made["losses"][0], rel=1e-5) if empty else made["losses"][0])
        assert loaded["losses"] == pytest.approx(made["losses"], rel=1e-2)
        assert [note for note in loaded["saved"] if "not compiled ahead" in note] == []
        assert any("compiled ahead" in note for note in loaded["saved"]) == empty, loaded["saved"]
