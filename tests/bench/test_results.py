"""The check of losses, and the tables, on rows written by hand."""

import json

import pytest
import torch

from stepgraph.bench import results
from stepgraph.bench.results import check_losses, in_one_line
from stepgraph.bench.rows import Row, section

ENVIRONMENT = {
    "versions": {"torch": "2.11.0", "stepgraph": "0.1.0", "cuda": "13.0"},
    "gpus": ["NVIDIA H200"],
    "cpu": "A processor",
    "torch_threads": 2,
}


def settings(device="cuda", **model):
    chosen = {"batch_size": 32, "seq_len": 2048, "precision": "bf16", "flops_per_token": 3e8, "peak_flops": 989.5e12}
    chosen |= {"losses": "losses agree"} | model
    return {"device": device, "steps": 10, "repeats": 5, "models": {"golf": chosen}}


def row(provider, step_ms=None, **values):
    tokens = 65536 / (step_ms / 1000) if step_ms else None
    return Row(model="golf", provider=provider, step_ms=step_ms, tokens_per_s=tokens, **values)


def test_losses_within_the_tolerance_agree():
    rows = [row("eager", losses=[5.0, 4.0]), row("compile", losses=[5.0, 4.0002])]
    assert check_losses(rows, "fp32") == (
        "losses agree with eager over 2 steps: largest relative difference 5.0e-05 (compile, step 2), "
        "tolerance 0.0001 (fp32)"
    )
    assert all(r.disagreement is None for r in rows)


@pytest.mark.parametrize(("precision", "loss"), [("fp32", 4.0005), ("fp32", 3.9995), ("bf16", 4.005), ("bf16", 3.995)])
def test_a_loss_beyond_the_tolerance_names_provider_and_step(precision, loss):
    # Eager is the reference wherever it stands.
    rows = [row("stepgraph", losses=[5.0, loss]), row("eager", losses=[5.0, 4.0]), row("compile", losses=[5.0, 4.0])]
    assert check_losses(rows, precision).startswith("losses disagree: stepgraph: the loss of step 2 is")
    assert [r.disagreement is None for r in rows] == [False, True, True]
    assert "that of eager 4:" in rows[0].disagreement


def test_losses_that_a_model_gives_in_bf16_may_be_two_units_apart():
    """Whisper's and T5's: 5.5 and 5.5625 are 1.1e-2 apart, and two units in the last place."""
    near, far = ([row("eager", losses=[6.0, 5.5]), row("compile", losses=[6.0, loss])] for loss in (5.5625, 5.625))
    assert check_losses(near, "bf16-parameters").startswith("losses agree") and near[1].disagreement is None
    check_losses(far, "bf16-parameters")
    assert far[1].disagreement.endswith("2.3e-02 apart, tolerance 0.0156 (bf16-parameters)")
    odd = [row("eager", losses=[6.0, 5.5]), row("compile", losses=[6.001, 5.5625])]
    assert "tolerance 0.01 " in check_losses(odd, "bf16-parameters") and odd[1].disagreement


def test_losses_may_be_as_far_apart_as_rounding_takes_them():
    """Each step's tolerance is that of what rounding did up to it; it is never below the precision's."""
    apart = [5.0, 4.0 * 1.003]  # as llama3-1b's in bf16 were, 1.5e-3 and more, on a healthy run

    def check(spread, precision="bf16"):
        rows = [row("eager", losses=[5.0, 4.0], spread=spread), row("compile", losses=apart)]
        return check_losses(rows, precision), rows[1].disagreement

    assert check(None)[1].endswith("4.012, that of eager 4: 3.0e-03 apart, tolerance 0.001 (bf16)")
    text, disagreement = check([1e-3, 2e-3])
    assert disagreement is None and text.endswith(
        "times the spread of eager's by rounding alone where that is more, up to 4.0e-03"
    )
    assert check([2e-3, 1e-3])[1] is None  # what an earlier step brought stays
    assert check([1e-3, 1e-3])[1].endswith("tolerance 0.002 (bf16), 2 times the spread of eager's by rounding alone")
    assert "tolerance 0.001 (bf16)" in check([1e-5, 1e-5])[1]
    assert check([0.0, 9.0])[1] is None and check([9.0, 0.0], "fp32")[1] is None


def test_fp8_may_be_further_from_eager():
    rows = [row("eager", losses=[4.0]), row("stepgraph-fp8-rowwise", losses=[4.1])]
    assert check_losses(rows, "bf16").endswith(
        "2.5e-02 (stepgraph-fp8-rowwise, step 1), tolerance 0.001 (bf16), of fp8 0.15"
    )
    rows = [row("eager", losses=[4.0]), row("stepgraph-fp8-rowwise", losses=[4.7]), row("compile", losses=[4.1])]
    assert check_losses(rows, "bf16").startswith("losses disagree") and all(r.disagreement for r in rows[1:])


def test_a_loss_that_is_not_finite_is_no_reference_and_does_not_agree():
    rows = [row("eager", losses=[5.0, None]), row("compile", losses=[5.0, 4.0]), row("stepgraph", losses=[5.0, 4.0])]
    assert check_losses(rows, "bf16") == "losses disagree: eager: the loss of step 2 is not finite"
    assert [r.disagreement is None for r in rows] == [False, True, True]


def test_without_two_providers_nothing_is_compared():
    nothing = "no two providers ran: no losses to compare"
    assert check_losses([row("eager", losses=[5.0]), row("compile", error="broke")], "fp32") == nothing
    assert check_losses([row("eager", error="broke")], "fp32") == nothing


def test_the_table_of_a_gpu():
    rows = [
        row("eager", 200.0, host_ms=30.0, peak_mem_gib=40.0, loss=8.3),
        row("compile", 150.0, host_ms=20.0, peak_mem_gib=30.0, loss=8.31),
        row("compile-max-autotune", 125.0, host_ms=1.25, peak_mem_gib=31.0, loss=8.32),
        row("stepgraph", 100.0, host_ms=0.5, peak_mem_gib=29.5, loss=8.33),
        row("stepgraph-exact", error="OutOfMemoryError: too much"),
    ]
    lines = section("golf", ENVIRONMENT, settings(), rows).splitlines()
    assert lines[0] == "### golf, batch 32 x 2048, bf16"
    assert lines[2] == "NVIDIA H200; torch 2.11.0, stepgraph 0.1.0, CUDA 13.0"
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert table[0] == [
        *("provider", "step ms", "vs compile", "vs eager", "tokens/s", "peak GiB", "loss", "host ms", "TFLOP/s", "MFU")
    ]
    # 655,360 tokens/s x 3e8 FLOP = 197 TFLOP/s, of 989.5
    assert table[5] == ["stepgraph", "100", "1.25x", "2.00x", "655,360", "29.50", "8.3300", "0.5", "197", "19.9%"]
    assert table[3][2] == "0.83x"  # compile next to the better mode
    assert table[6] == ["stepgraph-exact", "failed", *[""] * 8]
    assert len({len(line) for line in lines if line.startswith("|")}) == 1  # aligned
    text = "\n".join(lines)
    assert "(compile-max-autotune)" in text and "- stepgraph-exact failed: OutOfMemoryError: too much" in text


def test_the_table_of_a_cpu_without_torch_compile():
    rows = [row("eager", 200.0, step_mem_gib=0.5), row("stepgraph", 100.0, step_mem_gib=0.25)]
    text = section("golf", ENVIRONMENT, settings("cpu"), rows)
    assert "A processor, 2 threads; torch 2.11.0" in text and "MFU" not in text and "step MiB" in text
    assert "| stepgraph |     100 |            |    2.00x |" in text


def test_a_record_comes_back_as_it_was_written(tmp_path):
    rows = [row("eager", 200.0, losses=[5.0, None])]
    path = tmp_path / "record.json"
    results.write(path, ENVIRONMENT, settings(), rows)
    assert results.read(path) == (ENVIRONMENT, settings(), rows)
    json.loads(path.read_text(), parse_constant=pytest.fail)  # strict JSON


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"environment": 1, "settings": 2, "rows": [{"x": 3}]}'])
def test_another_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a record of stepgraph bench step, train, norm or model: use a file"):
        results.read(path)


def test_an_error_in_one_line_is_that_of_its_cause():
    """A wrapper such as torch's pipelining, whose error says neither out of memory nor where."""
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nGPU 0 has 140 GiB")
        except torch.OutOfMemoryError as inner:
            raise RuntimeError("[Stage 0] failed to run forward:\nargs: ...") from inner
    except RuntimeError as error:
        assert in_one_line(error) == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB GPU 0 has 140 GiB"
