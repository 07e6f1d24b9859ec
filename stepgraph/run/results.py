"""What a step gave."""

from dataclasses import dataclass, field

import torch

from stepgraph.graph.step_graph import OutputSpec

Tensor = torch.Tensor


@dataclass
class Results:
    """What a step gave: the loss (the sum of the calls' own), metrics and the highest levels by name, gradients in
    order."""

    loss: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    levels: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)

    def take(self, spec: OutputSpec, value: Tensor) -> None:
        """Add one output of a call."""
        if spec.kind == "loss":
            self.loss = value if self.loss is None else self.loss + value
        elif spec.kind == "total":
            self.loss = value
        elif spec.kind == "metric":
            self.metrics[spec.name] = value
        elif spec.kind == "level":
            highest = self.levels.get(spec.name)
            self.levels[spec.name] = value if highest is None else torch.maximum(highest, value)
        else:
            self.gradients.append(value)

    def tensors(self) -> list[Tensor]:
        """All of them."""
        loss = [] if self.loss is None else [self.loss]
        return [*loss, *self.metrics.values(), *self.levels.values(), *self.gradients]

    def cloned(self) -> "Results":
        """The same in tensors of its own."""
        copies = [{name: value.clone() for name, value in found.items()} for found in (self.metrics, self.levels)]
        loss = None if self.loss is None else self.loss.clone()
        return Results(loss, *copies, [value.clone() for value in self.gradients])
