"""Models of transformers that have no module here, in ``stepgraph train``: the same trainer, with their own code."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from stepgraph import cli

transformers = pytest.importorskip("transformers")
from stepgraph.models.transformers import CausalLM, lora_options, read_config  # noqa: E402
from tests.train.fine_tuning import make, records  # noqa: E402

COMMON = dict(vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
ROPE = COMMON | dict(intermediate_size=48, num_key_value_heads=2, max_position_embeddings=256)
KINDS = {
    "qwen3": transformers.Qwen3Config(**ROPE, head_dim=8, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(vocab_size=320, n_positions=256, n_embd=32, n_layer=2, n_head=4),
    "gemma3": transformers.Gemma3TextConfig(**ROPE, head_dim=8, sliding_window=16, pad_token_id=0),
    "mistral": transformers.MistralConfig(**ROPE, sliding_window=16),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations, and a small checkpoint of each kind with their tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    make(folder)
    for name, config in KINDS.items():
        shutil.copytree(folder / "base", folder / name)
        (folder / name / "model.safetensors").unlink()
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return folder


def run(*words):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(map(str, words)))
    return stop.value.code


def train(folder, *options):
    data = ["--data", folder / "chat.jsonl", "--seq-len", 64, "--lr", 3e-3, "--steps", 6, "--device", "cpu"]
    return run("train", *data, "--passes", "exact", "--saved-steps", "off", *options)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_start_to_export(folder, kind, capsys):
    out, exported = folder / f"run-{kind}", folder / f"out-{kind}"
    every = ["--checkpoint-every", 3, "--val-every", 3, "--val-batches", 2, "--verify"]
    assert train(folder, "--init-from-hf", folder / kind, "--out", out, "--export-hf", exported, *every) == 0
    assert "bitwise equal" in capsys.readouterr().out
    losses = records(out, "loss")
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1

    ours = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert type(ours.config) is type(KINDS[kind])
    assert transformers.AutoTokenizer.from_pretrained(exported).decode([ours.config.eos_token_id]) == "<|im_end|>"

    # Resumed from the middle, with dropout and all: the same numbers.
    assert (
        train(folder, "--resume", out / "checkpoints" / "step-00000003", "--export-hf", folder / f"again-{kind}") == 0
    )
    assert records(out, "loss") == losses
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / f"again-{kind}")
    for (name, p), q in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name

    capsys.readouterr()
    words = ["--chat", "--prompt", "What is 2 plus 3?", "--temperature", 0, "--max-new-tokens", 8]
    assert run("sample", out, *words) == 0
    said = capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    user = [{"role": "user", "content": "What is 2 plus 3?"}]
    prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = ours.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, prompt["input_ids"].shape[1] :]
    assert said == tokenizer.decode(made, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_row_do_not_see_each_other(folder, kind):
    from stepgraph.models.transformers import CausalLM, CausalLMConfig

    model = CausalLM(CausalLMConfig(str(folder / kind)), weights=True).eval()
    tokens = torch.randint(3, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(17), torch.arange(23)]).expand(2, 40)
    with torch.no_grad():
        together = model(tokens, positions)
        alone = torch.cat([model(tokens[:, :17]), model(tokens[:, 17:])], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "moe", "base"])
def test_a_model_from_parts_of_its_checkpoint(folder, moe, kind):
    """What a rank reads in parts makes the model that transformers reads, and it has no memory for weights before."""
    from safetensors.torch import load_file

    from stepgraph.config.hf_weights import check_files
    from stepgraph.models.transformers import CausalLM, CausalLMConfig

    config, shapes = CausalLMConfig(str(folder / kind)), check_files(folder / kind)
    model, whole = CausalLM(config, torch.bfloat16, True, shapes=shapes), CausalLM(config, torch.bfloat16, True)
    assert model.whole_because == "" and not whole.pieces
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) < 200
    files, pieces = load_file(folder / kind / "model.safetensors"), model.pieces_by_name()
    assert pieces.keys() == dict(whole.named_parameters()).keys()
    for name, param in whole.named_parameters():
        made = torch.full(param.shape, torch.nan, dtype=param.dtype)
        for piece in pieces[name]:
            part = files[piece.name]
            made[tuple(slice(*span) for span in piece.region)] = part[None] if piece.stacked else part
        assert torch.equal(made, param), name
    for (name, buffer), other in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    model.eval(), whole.eval()  # without dropout
    tokens, loaded = torch.arange(3, 27).view(2, 12), {n: p.detach() for n, p in whole.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, loaded, (tokens,)), whole(tokens))

    reasons = [({**shapes, next(iter(shapes)): (3, 3)}, "has another shape"), ({}, "is not in it")]
    for given, said in reasons:
        model = CausalLM(config, torch.bfloat16, True, shapes=given)
        assert said in model.whole_because and not model.pieces
        assert all(map(torch.equal, model.parameters(), whole.parameters()))


@pytest.mark.parametrize("kind", [*KINDS, "lfm2"])
def test_a_model_that_mixes_documents_is_refused(folder, kind):
    """Convolutions over the sequence do not stop where positions begin again."""
    from stepgraph.models.transformers import CausalLM, CausalLMConfig

    if kind == "lfm2":
        config = transformers.Lfm2Config(**ROPE, layer_types=["conv", "full_attention"])
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
    model = CausalLM(CausalLMConfig(str(folder / kind)), weights=True)
    if kind == "lfm2":
        with pytest.raises(ValueError, match=r"a document of a row sees the earlier ones.* use --document-mask off"):
            model.check_documents()
    else:
        model.check_documents()
        assert all(module.training for module in model.modules())


def test_what_such_a_model_does_not_have_is_refused(folder, capsys):
    given = ["--init-from-hf", folder / "qwen3"]
    for mesh in ("fsdp=2,tp=2", "cp=2", "fsdp=2,ep=2", "pp=2"):
        assert train(folder, *given, "--mesh", mesh) == 2
        assert "supports the axes fsdp, ddp and hsdp; drop the others" in capsys.readouterr().err

    other = folder / "other"
    other.mkdir()
    raw = json.loads((folder / "qwen3" / "config.json").read_text())
    refused = {
        "no causal language model of type 'vit'": {"model_type": "vit"},
        "is quantized (bitsandbytes)": {"quantization_config": {"quant_method": "bitsandbytes"}},
    }
    for said, change in refused.items():
        Path(other / "config.json").write_text(json.dumps(raw | change))
        assert train(folder, "--init-from-hf", other) == 2
        assert said in capsys.readouterr().err


def changed_weights(folder, change):
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(file)).items()}, file, metadata={"format": "pt"})


def configure(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def renamed(name):
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


def adapter(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')


DAMAGED = {
    "truncated": (cut, "model.safetensors is corrupt or truncated"),
    "shard": (renamed("model-00001-of-00002.safetensors"), "its index is missing, download it again"),
    "gguf": (renamed("model.gguf"), "GGUF has rounded weights for inference"),
    "adapter": (adapter, "holds an adapter (adapter_config.json) of a/b"),
    "shape": (lambda f: configure(f, intermediate_size=56), "has shape (32, 48), and config.json asks for (32, 56)"),
    "type": (lambda f: configure(f, hidden_size="32"), "transformers cannot build its model"),
    "activation": (lambda f: configure(f, hidden_act="none such"), "transformers cannot build its model"),
    "int8": (
        lambda f: changed_weights(f, lambda w: {k: v.to(torch.int8) if "q_proj" in k else v for k, v in w.items()}),
        "is stored as I8, only BF16, F16, F32, F64 are read",
    ),
    "missing": (
        lambda f: changed_weights(f, lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"}),
        "lacks model.norm.weight",
    ),
    "nan": (
        lambda f: changed_weights(f, lambda w: w | {"model.norm.weight": torch.full((32,), float("nan"))}),
        "Qwen3ForCausalLM gives NaN: look at its weights",
    ),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_folder_is_one_line(folder, tmp_path, damage, said, capsys):
    damaged = shutil.copytree(folder / "qwen3", tmp_path / "damaged")
    damage(damaged)
    assert train(folder, "--init-from-hf", damaged, "--out", tmp_path / "run") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert said in line


LORA = "r=4,alpha=8,targets=all-linear"


@pytest.mark.long
@pytest.mark.parametrize("form", ["", ",dora", ",rslora"])
def test_lora_from_start_to_an_adapter(folder, form, capsys):
    peft = pytest.importorskip("peft")
    out, exported = folder / f"run-lora{form}", folder / f"out-lora{form}"
    options = ["--init-from-hf", folder / "qwen3", "--lora", LORA + form, "--checkpoint-every", 3, "--verify"]
    assert train(folder, *options, "--lr", 3e-2, "--out", out, "--export-hf", exported) == 0
    assert "bitwise equal" in capsys.readouterr().out
    losses = records(out, "loss")
    assert losses[-1] < losses[0] - 0.1

    assert (
        train(
            folder, "--resume", out / "checkpoints" / "step-00000003", "--lr", 3e-2, "--export-hf", folder / f"x{form}"
        )
        == 0
    )
    assert records(out, "loss") == losses
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    plain = [p.clone() for p in base.parameters()]
    adapted = peft.PeftModel.from_pretrained(base, exported / "adapter")
    assert adapted.peft_config["default"].r == 4
    tokens = torch.randint(3, 320, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-5)
    changed = [not torch.equal(p, q) for p, q in zip(plain, merged.parameters(), strict=True)]
    assert any(changed) and not all(changed)
    reader = torch.distributed.checkpoint.FileSystemReader(out / "checkpoints" / "step-00000006")
    saved = [name for name in reader.read_metadata().state_dict_metadata if name.startswith(("model.", "optimizer."))]
    assert saved and all("lora_" in name for name in saved)  # frozen weights are not


@pytest.fixture(scope="module")
def moe(folder):
    """A checkpoint of experts that share parameters: 4 of 32 x 32 and 4 of 32 x 16 values."""
    experts = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8)
    shutil.copytree(folder / "base", folder / "moe")
    (folder / "moe" / "model.safetensors").unlink()
    config = transformers.Qwen3MoeConfig(**ROPE | {"num_hidden_layers": 1}, **experts)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "moe")


@pytest.mark.long
def test_lora_of_experts_from_start_to_an_adapter(folder, moe, capsys):
    peft = pytest.importorskip("peft")
    out, options = folder / "out-moe", ["--lora", "r=8,targets=q_proj+experts", "--lr", 3e-2, "--verify"]
    assert (
        train(folder, "--init-from-hf", folder / "moe", *options, "--out", folder / "run-moe", "--export-hf", out) == 0
    )
    assert "bitwise equal" in capsys.readouterr().out
    losses = records(folder / "run-moe", "loss")
    assert losses[-1] < losses[0] - 0.05
    merged = transformers.AutoModelForCausalLM.from_pretrained(out)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "moe")
    plain = base.model.layers[0].mlp.experts.down_proj.detach().clone()
    assert not torch.equal(merged.model.layers[0].mlp.experts.down_proj, plain)
    adapted, tokens = peft.PeftModel.from_pretrained(base, out / "adapter"), torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-5)


def test_words_of_lora():
    pytest.importorskip("peft")
    from stepgraph.models.transformers import lora_options

    assert lora_options("r=8,dora,targets=q_proj+v_proj,rslora") == {
        **{"r": 8, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 16, "lora_dropout": 0.0},
        **{"use_dora": True, "use_rslora": True},
    }
    assert lora_options("dora") == lora_options("r=16") | {"use_dora": True}
    experts = {"target_modules": "all-linear", "target_parameters": ["experts"]}
    assert lora_options("targets=all-linear+experts") == lora_options("r=16") | experts


@pytest.mark.parametrize(
    ("precision", "quantize"), [*((p, None) for p in ("fp32", "bf16", "bf16-autocast")), ("bf16", "nf4"),
                                ("bf16-autocast", "fp8")]
)  # fmt: skip
def test_the_graph_knows_frozen_weights(folder, precision, quantize):
    pytest.importorskip("peft")
    from stepgraph.cli import parse_train
    from stepgraph.config import build
    from stepgraph.graph.values import OptimizerState, Parameter
    from stepgraph.step import CapturedStep

    words = ["--init-from-hf", folder / "qwen3", "--lora", LORA, "--data", folder / "chat.jsonl", "--seq-len", "16"]
    words += ["--quantize", quantize] if quantize else []
    config = parse_train([*map(str, words), "--passes", "exact", "--precision", precision, "--device", "cpu"])
    device = torch.device("cpu")
    model = build.build_model(config, device)
    optimizer, loss_fn = build.build_optimizer(config, model), build.build_loss(config, device)
    step = CapturedStep(
        build.step_spec(config, model, loss_fn, build.example_batch(config, device), optimizer), None, None
    )
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    held = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {param.dtype for param in model.parameters() if param.requires_grad} == {held}
    assert {i.what.parameter for i in step.graph.inputs if isinstance(i.what, OptimizerState)} == trained
    masters = [i for i in step.graph.inputs if isinstance(i.what, OptimizerState) and i.what.key == "master"]
    assert bool(masters) == (precision == "bf16")
    casts = [
        what.path
        for node, what in step.graph.bound()
        if isinstance(what, Parameter) and what.path not in trained and node.meta["val"].ndim == 2
        for user in node.users
        if user.target is torch.ops.aten._to_copy.default
    ]
    assert [path for path in casts if "embed" not in path] == []
    products = [node for node in step.graph.nodes("backward") if node.target is torch.ops.aten.mm.default]
    outer = {tuple(node.meta["val"].shape) for node in products}
    frozen = {tuple(p.shape) for name, p in model.named_parameters() if name not in trained and p.ndim == 2}
    assert not outer & (frozen | {shape[::-1] for shape in frozen})  # no gradient of a frozen weight


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_lora_next_to_quantized_weights(folder, kind, capsys):
    """What is exported is what was trained: the adapter by itself next to the bits, and merged with what they say."""
    peft = pytest.importorskip("peft")
    from stepgraph.kernels.quant import quantize_linear

    out, exported = folder / f"run-{kind}", folder / f"out-{kind}"
    options = ["--init-from-hf", folder / "qwen3", "--lora", LORA, "--quantize", kind, "--seq-len", 48, "--verify"]
    assert train(folder, *options, "--lr", 3e-2, "--steps", 4, "--out", out, "--export-hf", exported) == 0
    printed = capsys.readouterr().out
    assert "bitwise equal" in printed and f"14 frozen layers in {kind}" in printed
    losses = records(out, "loss")
    assert losses[-1] < losses[0] - 0.05

    merged = transformers.AutoModelForCausalLM.from_pretrained(exported)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    plain = base.model.layers[0].mlp.up_proj.weight.clone()
    quantize_linear(base, kind, skip=["lm_head"])
    assert not torch.equal(base.model.layers[0].mlp.up_proj.dequantize(), plain)
    adapted = peft.PeftModel.from_pretrained(base, exported / "adapter")
    tokens = torch.randint(3, 320, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["nf4", pytest.param("fp8", marks=pytest.mark.long)])
def test_lora_of_quantized_experts(folder, moe, kind, capsys):
    peft = pytest.importorskip("peft")
    from stepgraph.kernels.quant import quantize_experts, quantize_linear

    out, exported = folder / f"run-moe-{kind}", folder / f"out-moe-{kind}"
    options = ["--init-from-hf", folder / "moe", "--lora", "r=8,targets=q_proj+experts", "--quantize", kind]
    options += ["--seq-len", 48, "--steps", 4, "--lr", 3e-2, "--verify"]
    assert train(folder, *options, "--out", out, "--export-hf", exported) == 0
    printed = capsys.readouterr().out
    assert "bitwise equal" in printed and f"; 4 frozen layers and 2 weights of experts in {kind}, 0.0 MiB" in printed
    assert "2 dequantized weights are not kept for backward" in (out / "passes.txt").read_text()
    losses = records(out, "loss")
    assert losses[-1] < losses[0] - 0.05

    merged = transformers.AutoModelForCausalLM.from_pretrained(exported)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "moe")
    quantize_linear(base, kind, skip=["lm_head"])
    adapted = peft.PeftModel.from_pretrained(base, exported / "adapter")
    made, stays = quantize_experts(adapted, kind)
    assert len(made) == 2 and not stays
    tokens = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quantize", "nf4"], "add --lora r=16"),
        (["--quantize", "nf5", "--lora", "r=4"], "nf4"),
        (["--quantize", "nf4", "--lora", "r=4", "--init-from-hf", "gpt2"], "no linear layers besides its head"),
        (["--quantize", "nf4", "--lora", "r=4", "--init-from-hf", None], "no PRESET"),
    ],
)
def test_a_wrong_quantize_is_one_line(folder, words, said, capsys):
    pytest.importorskip("peft")
    model = words.pop() if "--init-from-hf" in words else "qwen3"
    words = [word for word in words if word != "--init-from-hf"]
    model = ["--init-from-hf", folder / model] if model else []
    assert train(folder, *model, *words, "--out", folder / "run-wrong") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ("r=0", "r=16,alpha=32"),
        ("dora=1", "dora, rslora may follow"),
        ("rank=4", "r=16,alpha=32"),
        ("targets=wq", "lora: Target modules"),
        ("targets=experts", "lora: targets name experts, and Qwen3ForCausalLM has none in one parameter: drop them"),
        ("r=4", "no PRESET"),
    ],
)
def test_a_wrong_lora_is_one_line(folder, lora, said, capsys):
    pytest.importorskip("peft")
    model = [] if said == "no PRESET" else ["--init-from-hf", folder / "qwen3"]
    assert train(folder, *model, "--lora", lora, "--out", folder / "run-wrong") == 2
    assert said in capsys.readouterr().err


def test_a_name_that_the_hub_does_not_give_is_one_line(folder, capsys, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    assert train(folder, "--init-from-hf", "someone/some-model") == 2
    assert (
        "someone/some-model is not a folder, and its download from the Hub failed (no network)"
        in capsys.readouterr().err
    )


def test_a_name_of_the_hub_is_downloaded(folder, monkeypatch):
    from stepgraph.cli import parse_train

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder / name.split("/")[1]))
    words = ["--init-from-hf", "someone/gpt2", "--data", str(folder / "chat.jsonl"), "--seq-len", "64"]
    assert parse_train(words).init_from_hf == folder / "gpt2"


@pytest.mark.parametrize("targets", ["wte", "lm_head", "wte+lm_head", "c_attn"])
def test_an_adapter_of_a_tied_table_is_merged_into_that_alone(targets, tmp_path):
    peft = pytest.importorskip("peft")
    shape = dict(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(tmp_path / "base")
    config = read_config(tmp_path / "base")
    model = CausalLM(config, lora=lora_options(f"r=4,targets={targets}"))
    for param in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(param, std=0.3)
    model.save(tmp_path / "out", {}, model.state_dict(), model.read_base())
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    adapted = peft.PeftModel.from_pretrained(model.read_base(), tmp_path / "out" / "adapter").eval()
    tokens = torch.randint(64, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-5)
    assert merged.config.tie_word_embeddings == (targets == "c_attn")
