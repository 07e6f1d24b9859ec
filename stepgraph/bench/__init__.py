"""``stepgraph bench``: comparisons with eager, ``torch.compile`` and others, as JSON, a table and a picture."""

from stepgraph.errors import unknown_name

USAGE = """usage: stepgraph bench NAME [options]

Compare stepgraph with eager, torch.compile and other packages, on the same inputs.

names:
  step [PRESET ...] [options]        one training step; see stepgraph bench step --help
  train [PRESET] [options]           one training step over several devices, next to torchtitan; see stepgraph
                                     bench train --help
  model NAME ... [options]           one training step of unmodified transformers models, next to eager, torch.compile
                                     and Liger; see stepgraph bench model --help
  norm [options]                     RMS norm and layer norm, forward and backward, shape by shape, next to other
                                     packages' kernels; see stepgraph bench norm --help
  report FILE.json ... [--plot PNG]  recorded measurements as Markdown tables and as a chart
"""


def main(argv: list[str]) -> int:
    """Runs ``stepgraph bench ARGV`` and returns its exit status. Raises ValueError, in one line, for a wrong use."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    match name:
        case "-h" | "--help":
            print(USAGE, end="")
            return 0
        case "step":
            from stepgraph.bench.step import command as step

            return step.main(rest)
        case "train":
            from stepgraph.bench.train import command as train

            return train.main(rest)
        case "model":
            from stepgraph.bench.model import command as model

            return model.main(rest)
        case "norm":
            from stepgraph.bench.norm import command as norm

            return norm.main(rest)
        case "report":
            from stepgraph.bench import report

            return report.main(rest)
    raise unknown_name("benchmark", name, ["step", "train", "model", "norm", "report"])
