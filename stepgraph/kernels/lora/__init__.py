"""Low-rank adapters: their product and the base layer's, accumulated into one result; a gated layer between them."""

from stepgraph.kernels.lora.gated import gated_adapters, gated_adapters_backward
from stepgraph.kernels.lora.sums import sum_products
