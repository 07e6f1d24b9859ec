"""The launches of the kernels of experts, by the names that tests give them."""

from stepgraph.kernels.moe import grouped_triton, route_triton, rows_triton, scaled_triton, swiglu_triton

FUNCTIONS = {
    "sort": route_triton.launch,
    "gather": rows_triton.gather,
    "combine": rows_triton.combine,
    "combine_backward": rows_triton.combine_backward,
    "zero_past": grouped_triton.zero_past,
    "cast_groups": lambda *given: scaled_triton.launch(*given)[:2],
    "cast_packed": scaled_triton.launch_packed,
    "swiglu_cast": swiglu_triton.launch_cast,
    "swiglu_cast_backward": swiglu_triton.launch_cast_backward,
    "swiglu": swiglu_triton.launch,
    "swiglu_backward": swiglu_triton.launch_backward,
}
