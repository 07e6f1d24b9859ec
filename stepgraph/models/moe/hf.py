"""Experts in a Hugging Face checkpoint: a tensor for each expert and product, which ours hold stacked."""

from collections.abc import Callable, Sequence

from stepgraph.models.family import Piece, whole_piece


def pieces(hf_name: Callable[[str], str], name: str, shape: Sequence[int]) -> list[Piece]:
    """The tensors of a checkpoint that make up ours called ``name``: of ``experts.gate_up_proj.weight`` (E, 2 F, D),
    ``experts.0.gate_proj.weight`` (F, D), ``experts.0.up_proj.weight``, ``experts.1.gate_proj.weight`` and so on."""
    before, experts, product = hf_name(name).partition(".experts.")
    if not experts:
        return whole_piece(hf_name(name), shape)
    n_experts, rows, width = shape
    parts = {product: (0, rows)}
    if product == "gate_up_proj.weight":
        parts = {"gate_proj.weight": (0, rows // 2), "up_proj.weight": (rows // 2, rows)}
    return [
        Piece(f"{before}.experts.{e}.{part}", ((e, e + 1), span, (0, width)), stacked=True)
        for e in range(n_experts)
        for part, span in parts.items()
    ]
