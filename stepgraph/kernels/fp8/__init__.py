"""fp8: casts with a scale per tensor or row, and products of the results."""

from stepgraph.kernels.fp8.cast import cast_scaled, cast_scaled_rows, transposed_bytes
from stepgraph.kernels.fp8.product import scaled_product
