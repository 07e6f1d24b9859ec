"""Dependencies that keep communication in order, where Inductor has joined operations to one node."""

from types import SimpleNamespace

from stepgraph.inductor.communication import KeepOrder


class Node(SimpleNamespace):
    """A scheduler's node of the operations ``names``, which reads what ``needs`` made."""

    def __init__(self, scheduler, names, needs=()):
        needed = [SimpleNamespace(name=need) for need in needs]
        super().__init__(scheduler=scheduler, names=names, unmet_dependencies=needed, ancestors=set())

    def get_operation_names(self):
        return self.names


def test_ancestors_pass_through_a_node_of_several_operations():
    made = {name: SimpleNamespace(defining_op_name=lambda name=name: name) for name in ("op0", "op1", "op2", "op3")}
    scheduler = SimpleNamespace(name_to_buf=made)
    nodes = [Node(scheduler, ["op0"]), Node(scheduler, ["op1", "op2"], ["op0"]), Node(scheduler, ["op3"], ["op2"])]
    KeepOrder._note_ancestors(nodes)
    assert [node.ancestors for node in nodes] == [set(), {"op0"}, {"op0", "op2"}]
