"""How tensor parallelism treats a layer with experts."""

#: Module -> style. To experts, tensor-parallel ranks are data-parallel ones: each brings its part of the sequence.
EXPERTS = {"layers.*.mlp.router": "sequence", "layers.*.mlp.experts.*": "sequence"}
