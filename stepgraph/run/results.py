"""The results of a step."""

from dataclasses import dataclass, field

import torch

from stepgraph.graph.values import Gradient, Loss, MadeState, Metric, Output, Ratio, Read, Reported, TotalLoss

Tensor = torch.Tensor


@dataclass
class Results:
    """The results of a step. ``loss``: summed over calls. ``metrics``, and the highest ``ratios``, by name.
    ``gradients``, and ``made``, new state of the optimizer, in order. ``reported`` and ``read``: by name, the values
    that each call reported, and the ones that Python reads."""

    loss: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    ratios: dict[str, Tensor] = field(default_factory=dict)
    reported: dict[str, list[Tensor]] = field(default_factory=dict)
    read: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    def take(self, what: Output, value: Tensor) -> None:
        """Add one output of a call."""
        match what:
            case Loss():
                self.loss = value if self.loss is None else self.loss + value
            case TotalLoss():
                self.loss = value
            case Metric(name):
                self.metrics[name] = value
            case Reported(name):
                self.reported.setdefault(name, []).append(value)
            case Read(key):
                self.read.setdefault(key, []).append(value)
            case Ratio(condition):
                highest = self.ratios.get(condition)
                self.ratios[condition] = value if highest is None else torch.maximum(highest, value)
            case Gradient():
                self.gradients.append(value)
            case MadeState():
                self.made.append(value)

    def tensors(self) -> list[Tensor]:
        """All of them."""
        loss = [] if self.loss is None else [self.loss]
        reported = [value for found in (self.reported, self.read) for values in found.values() for value in values]
        return [*loss, *self.metrics.values(), *self.ratios.values(), *reported, *self.gradients, *self.made]

    def cloned(self) -> "Results":
        """The same in tensors of its own."""
        copies = [{name: value.clone() for name, value in found.items()} for found in (self.metrics, self.ratios)]
        loss = None if self.loss is None else self.loss.clone()
        of_calls = [
            {name: [value.clone() for value in values] for name, values in found.items()}
            for found in (self.reported, self.read)
        ]
        lists = ([value.clone() for value in found] for found in (self.gradients, self.made))
        return Results(loss, *copies, *of_calls, *lists)
