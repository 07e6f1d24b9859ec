"""What the runner checks after every pass, for the graph of one step."""

from stepgraph.passes import verify


def wrong_values(step):
    """A line for each node of ``step`` whose recorded value does not follow from its inputs."""
    values = verify.RecordedValues(step)
    values._captured = set()
    return [f"{node.name}: recorded is {recorded}, from its inputs follows {found}"
            for node, recorded, found in values._problems(step.graph.nodes)]  # fmt: skip
