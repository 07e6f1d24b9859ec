"""``stepgraph bench``: comparisons with eager, ``torch.compile`` and others, as JSON, a table and a picture."""

import importlib

from stepgraph.errors import unknown_name

USAGE = """usage: stepgraph bench NAME [options]

Compare stepgraph with eager, torch.compile and other packages, on the same inputs.

names:
  step [PRESET ...] [options]        one training step, next to eager and torch.compile
  train [PRESET] [options]           one training step on several devices, next to torchtitan
  model NAME ... [options]           one training step of unmodified transformers models, next to eager, torch.compile
                                     and Liger; see stepgraph bench model --help
  norm [options]                     RMS norm and layer norm, forward and backward, shape by shape, next to other
                                     packages' kernels; see stepgraph bench norm --help
  report FILE.json ...               recorded measurements as Markdown tables
"""
#: Name -> the module that measures.
_MODULES = {name: f"stepgraph.bench.{name}.command" for name in ("step", "train", "model", "norm")}
_MODULES["report"] = "stepgraph.bench.report"


def main(argv: list[str]) -> int:
    """Runs ``stepgraph bench ARGV`` and returns its exit status. Raises ValueError, in one line, for a wrong use."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if name not in _MODULES:
        raise unknown_name("benchmark", name, _MODULES)
    return importlib.import_module(_MODULES[name]).main(rest)
