"""Random small programs of views, casts and in-place writes give the same bits before and after the exact passes."""

import pytest
import torch
from torch import nn

from stepgraph.passes import configured

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

N = 4
DTYPES = [torch.float32, torch.bfloat16, torch.float64]

# Values are (N, N) at any time. Each action: (name, which value, which other value, a small number).
ACTIONS = [
    "t", "view", "double_t", "detach", "cast", "round_trip", "same_cast", "new", "mul_", "add_other_", "write_row",
    "write_view", "fill_masked_", "index_put_", "chunk_write", "unbind_copy", "use",
]  # fmt: skip
programs = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7), st.integers(0, 7), st.integers(0, 3)),
    min_size=3,
    max_size=14,
)


class Program(nn.Module):
    """Runs a list of actions on values that hang on no parameter; ``use`` multiplies one by the parameter, through a
    function whose result backward reads, so that recomputation could read what was written since."""

    def __init__(self, actions):
        super().__init__()
        self.actions = actions
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, N * N).view(N, N))
        self.register_buffer("state", torch.linspace(-1, 1, N * N).view(N, N))

    def forward(self, x):
        values = [x.clone(), x + 1, self.state]
        total = self.w.sum()
        for name, i, j, k in [*self.actions, *(("use", i, 0, 0) for i in range(4))]:
            a, b = values[i % len(values)], values[j % len(values)]
            if name == "t":
                values.append(a.t())
            elif name == "view":
                values.append(a.reshape(N * N).view(N, N))
            elif name == "double_t":
                values.append(a.t().t())
            elif name == "detach":
                values.append(a.detach())
            elif name == "cast":
                values.append(a.to(DTYPES[k % 3]))
            elif name == "round_trip":
                values.append(a.to(DTYPES[k % 3]).to(a.dtype))
            elif name == "same_cast":
                values.append(a.to(a.dtype, copy=True))
            elif name == "new":
                values.append(torch.sin(a) + b)
            elif name == "mul_":
                a.mul_(0.5 + k)
            elif name == "add_other_":
                a.add_(b.clone().to(a.dtype))
            elif name == "write_row":
                a[k] = 0.25
            elif name == "write_view":
                a.t()[k].copy_(b[0].clone())
            elif name == "fill_masked_":
                a.masked_fill_(a > 0.5, 0.125 * k)
            elif name == "index_put_":
                a.index_put_((torch.tensor([k]),), torch.full((N,), 0.75, dtype=a.dtype))
            elif name == "chunk_write":
                a.chunk(2)[k % 2].sub_(1)
            elif name == "unbind_copy":
                a.unbind(0)[k].copy_(b[1].clone())
            else:
                total = total + (torch.tanh(torch.cos(a.float())) * self.w).sum()
        return total + sum(v.float().sum() for v in values)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(programs, st.sampled_from(["none", "selective", "full"]))
def test_random_programs(tools, actions, policy):
    x = torch.linspace(-2, 2, N * N).view(N, N)
    step = tools.trace(Program(actions), lambda model, batch: model(batch["x"]), {"x": x})
    model = Program(actions)
    tools.check_same(step, [model.w.detach(), model.state, x], configured("exact", memory=policy))
