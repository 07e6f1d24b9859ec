"""Which options of a step are compatible.

A new option is a field of `stepgraph.options.StepOptions` and the pass that reads it (``from_options`` where it is
registered): the command lines, ``config.json`` and the forecast take it from there.
"""

from stepgraph.errors import require_words, unknown_name
from stepgraph.options import StepOptions, choices
from stepgraph.passes.contract import get
from stepgraph.passes.loss.chunk import check_chunks
from stepgraph.passes.memory.policy import check_tiles, parse_policy

#: Option -> what exact passes do, and the values that ask for nothing else.
_LEFT_BY_EXACT: dict[str, tuple[str, tuple[object, ...]]] = {
    "norm": ("leaves norms to eager", ("auto",)),
    "attention": ("leaves attention to eager", ("auto", "eager")),
    "epilogues": ("leaves products to torch", ("torch",)),
    "loss_chunks": ("leaves the loss to eager", ("auto", 1)),
    "loss_rows": ("leaves the loss to eager", ("auto", "all")),
    "inductor": ("compiles nothing", ("full", "off")),  # full is the default
    "fp8": ("does not round to fp8", ("off",)),
    "tiles": ("adds up tokens as eager does", ("auto", 1)),
    "async_tp": ("adds up as eager does", (False,)),
    "copy_engines": ("adds up as eager does", (False,)),
}


def check_step(options: StepOptions, *, tp: int | None = None, dp_shard: int | None = None) -> None:
    """Raise ``ValueError``, in one line, for the first option that cannot be right or could do nothing.

    ``tp``, ``dp_shard``: sizes of the mesh that the step will run on, None where they are not known.
    """
    for name, allowed in choices(StepOptions).items():
        if getattr(options, name) not in allowed:
            raise unknown_name(name, getattr(options, name), allowed)
    for name in ("disable_pass", "fp8_skip"):
        require_words(name, getattr(options, name))
    parse_policy(options.memory)
    check_chunks(options.loss_chunks)
    check_tiles(options.tiles)
    for name in options.disable_pass:
        get(name)
    for name, (left, without_effect) in _LEFT_BY_EXACT.items():
        value = getattr(options, name)
        if options.passes == "exact" and value not in without_effect:
            raise ValueError(f"{name}={value} with passes=exact, which {left}: drop one of them")
    if options.attention == "flex" and not options.compiles_attention:
        why = "inductor=off" if options.inductor == "off" else f"disable_pass={','.join(options.disable_pass)}"
        raise ValueError(
            f"attention=flex with {why}: FlexAttention's kernels are Inductor's; allowed then: attention=auto, "
            "cudnn, flash2, fa4 or eager: choose one, or inductor=regional"
        )
    if options.norm == "inductor" and options.inductor == "off":
        raise ValueError("norm=inductor with inductor=off; allowed then: norm=auto, kernel or eager")
    if options.async_tp and tp == 1:
        raise ValueError("async_tp needs tensor parallelism: add tp=2 to the mesh")
    if options.copy_engines and dp_shard == 1:
        raise ValueError("copy_engines needs FSDP: add fsdp=2 to the mesh")
    if options.fp8_skip and options.fp8 == "off":
        raise ValueError("fp8_skip needs fp8, and fp8=off: add fp8=tensorwise or rowwise, or drop it")
    if options.fp8_experts and options.fp8 == "off":
        raise ValueError("fp8_experts needs fp8, and fp8=off: add fp8=rowwise or tensorwise, or drop it")
