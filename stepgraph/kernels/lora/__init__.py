"""Low-rank adapters: their product and the base layer's, accumulated into one result."""

from stepgraph.kernels.lora.sums import sum_products
