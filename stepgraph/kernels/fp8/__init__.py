"""fp8: casts with a scale for each tensor or row, and the product of what they give."""

from stepgraph.kernels.fp8.cast import cast_by_magnitudes, cast_scaled, cast_scaled_rows
from stepgraph.kernels.fp8.product import scaled_product
from stepgraph.kernels.fp8.swiglu import (
    swiglu_backward_cast_rows,
    swiglu_backward_magnitudes,
    swiglu_cast_rows,
    swiglu_magnitudes,
)
