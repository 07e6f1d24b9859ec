"""The kernels in the code that Inductor generated, and which operators of its graph each computes."""

import re
from dataclasses import dataclass

#: ``NAME = async_compile.triton('NAME', '''TEXT''', ...)``, or ``cpp_pybinding([...], r'''TEXT''')``.
_DEFINED = re.compile(r"^(\w+) = async_compile\.(\w+)\(.*?r?'''\n(.*?)\n'''", re.MULTILINE | re.DOTALL)
#: Above the lines that it explains: which nodes of the graph they come from.
_COMES_FROM = re.compile(r"\s*# (?:Topologically Sorted )?Source Nodes: \[([^\]]*)\]")
_LONGEST = 20_000  # letters of one kernel that are kept


@dataclass
class Kernel:
    """``nodes``: names of the nodes of the compiled graph that it computes, in its order; empty where Inductor does not
    say, as of C++. ``text``: Triton from ``@triton.jit`` on, or C++."""

    name: str
    text: str
    nodes: list[str]


def kernels_of(source: str) -> list[Kernel]:
    """The kernels of one compiled graph in the order of their definitions; none for an empty ``source``."""
    # Before the first program there may be another, which tunes the same kernels.
    program = source.rpartition('\n"""\n')[2]
    kernels = {name: Kernel(name, _body(text), []) for name, _, text in _DEFINED.findall(program)}
    launch = re.compile(rf"\s*({'|'.join(map(re.escape, kernels))})(?:\.run)?\(") if kernels else None
    named: list[str] = []
    for line in program.splitlines():
        if found := _COMES_FROM.match(line):
            named = [name.strip() for name in found[1].split(",") if name.strip()]
        elif launch is not None and (found := launch.match(line)):
            nodes = kernels[found[1]].nodes
            nodes += [name for name in named if name not in nodes]
            named = []
        elif "extern_kernels." in line or "torch.ops." in line:
            named = []  # a call of another library
    return list(kernels.values())


def _body(text: str) -> str:
    body = text[text.find("@triton.jit") :] if "@triton.jit" in text else text
    return body if len(body) <= _LONGEST else body[:_LONGEST] + "\n..."
