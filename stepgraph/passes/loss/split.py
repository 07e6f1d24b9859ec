"""The cross entropy over a vocabulary that ranks share, as `fuse_loss` rewrites it: its gradient takes the place of the
logits.

Matches: ``stepgraph::token_gradient_`` over a copy of the logits, as the loss of `stepgraph.parallel` makes it. Before
-> after: ``clone(logits)`` -> ``logits``. Precondition: nothing reads the memory of the logits after that copy, or
writes to it.
"""

from dataclasses import dataclass

import torch
from torch import fx

from stepgraph.graph.aliases import Aliases
from stepgraph.graph.edit import replace


@dataclass
class SplitLoss:
    """``copy``: of the ``logits``, which the gradient overwrites. ``private``: always; see `fuse._Loss`."""

    logits: fx.Node
    copy: fx.Node
    private: bool = True

    def rewrite(self, _: Aliases) -> None:
        """Overwrite the logits themselves."""
        replace(self.copy, self.logits)


def match(gradient: fx.Node, aliases: Aliases) -> SplitLoss | str | None:
    """The loss whose backward is ``gradient``, or why it cannot be rewritten; None for another loss."""
    copy = gradient.args[0]
    if copy.target is not torch.ops.aten.clone.default:
        return None
    logits = copy.args[0]
    root = aliases.root(logits)
    if root.op != "call_function" or not logits.meta["val"].is_contiguous():
        return "its logits are an input of the step, or not contiguous"
    if aliases.writes.get(root) or any(at > aliases.position[copy] for at in aliases.reads(logits)):
        return "its logits are read after it, or written to"
    return SplitLoss(logits, copy)
