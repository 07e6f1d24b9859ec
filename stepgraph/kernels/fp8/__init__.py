"""fp8: casts with a scale for each tensor or row, and the product of what they give."""

from stepgraph.kernels.fp8.cast import cast_scaled, cast_scaled_rows
from stepgraph.kernels.fp8.product import scaled_product
