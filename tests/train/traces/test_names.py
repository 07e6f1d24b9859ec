"""Kernels named by node, on traces made by hand in the form that torch.profiler exports."""

from stepgraph.train.traces.profile import Trace, label, labels, measured, renamed, sequence

A, B = label("step", "mm", "layers.0"), label("step", "mul", "layers.1")


def event(cat, name, ts, dur=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def launched(number, at, kernel, dur=5, by="cudaLaunchKernel"):
    """A launch on the host, and the kernel, which runs much later."""
    return [
        event("cuda_runtime", by, at, correlation=number),
        event("kernel", kernel, 1000 + at, dur, correlation=number),
    ]


def plain_step():
    return [
        event("user_annotation", A, 0, 10),
        *launched(1, 2, "gemm"),
        *launched(2, 4, "copy"),
        event("user_annotation", B, 20, 10),
        *launched(3, 21, "copy"),
        *launched(4, 40, "memset"),  # outside every range
        {"ph": "M", "name": "process_name"},
    ]


def replays(*orders):
    """Steps that are one CUDA graph each."""
    events = []
    for step, order in enumerate(orders):
        events.append(event("cuda_runtime", "cudaGraphLaunch", step * 100, correlation=step))
        kernels = enumerate(order)
        events += [event("kernel", name, 2000 + step * 100 + k, 7, correlation=step) for k, name in kernels]
    return events


def test_a_launch_tells_the_range():
    trace = Trace(plain_step())
    assert labels(trace, 1, None) == [A, A, B, None]
    assert sequence(trace) == {"gemm": [A], "copy": [A, B]}


def test_a_replay_is_named_by_the_order_of_equal_kernels():
    order = sequence(Trace(plain_step()))
    # Streams may interleave kernels of other names; those of one name keep their order.
    trace = Trace(replays(["copy", "gemm", "copy"], ["gemm", "copy", "copy"]))
    assert labels(trace, 2, order) == [A, A, B, A, A, B]


def test_nothing_is_guessed():
    order = sequence(Trace(plain_step()))
    trace = Trace(replays(["copy", "gemm"], ["gemm", "copy", "copy"]))
    assert labels(trace, 2, order) == [None, A, A, None, None]
    assert labels(trace, 2, None) == [None] * 5
    unknown = Trace([*replays(["other"]), *launched(9, 50, "gemm")])  # not in the order; launched next to the graph
    assert labels(unknown, 1, order) == [None, None]


def test_times_are_of_one_step():
    order = sequence(Trace(plain_step()))
    trace = Trace(replays(["copy", "gemm", "copy"], ["copy", "gemm", "copy"]))
    found = measured(trace, labels(trace, 2, order), 2)
    assert found == {
        "step/mm": {"ns": 14_000, "kernels": [["copy", 7_000], ["gemm", 7_000]]},
        "step/mul": {"ns": 7_000, "kernels": [["copy", 7_000]]},
    }


def test_on_a_cpu_the_range_is_the_time():
    trace = Trace([event("user_annotation", A, 0, 30), event("user_annotation", A, 50, 10)])
    assert measured(trace, labels(trace, 2, None), 2) == {"step/mm": {"ns": 20_000, "kernels": []}}


def test_a_viewer_shows_node_and_module():
    events = plain_step()
    trace = Trace(events)
    named = renamed(events, trace, labels(trace, 1, None))
    assert len(named) == len(events)
    kernels = [e for e in named if e.get("cat") == "kernel"]
    assert [k["name"] for k in kernels] == ["mm layers.0: gemm", "mm layers.0: copy", "mul layers.1: copy", "memset"]
    assert kernels[0]["args"]["kernel"] == "gemm" and kernels[0]["args"]["node"] == "step/mm"
