"""Errors while a step is traced, as one line: module path, source line, what torch says, and a fix."""

import contextlib
import re
import traceback
from collections.abc import Iterator

import torch
from torch import fx, nn

from stepgraph import compat
from stepgraph.capture.optimizer.own_step import Again
from stepgraph.capture.python.host_draws import DrawsFound
from stepgraph.capture.recorder import Recorder, RunAgain, is_user_file, user_source
from stepgraph.errors import CaptureError, TraceError, first_line
from stepgraph.graph.facts import is_random

#: What torch says, or which of its operators fails -> what to do.
_FIXES = (
    (
        r"[Nn]ested|jagged|self.shape_env must not be None",
        "keep rows of unequal length in one padded tensor with a mask, or a flat one with offsets; "
        "nn.TransformerEncoder takes enable_nested_tensor=False",
    ),
    (r"[Qq]uantized", "use dequantize(), or pass the integers, scales and zero points as tensors"),
    (r"[Ss]parse", "use dense tensors: to_dense(), or index_add and scatter for the values of a sparse one"),
    (r"meta and cpu|hessian|jacfwd|jvp", "write it by reverse mode alone: jacrev(jacrev(f)) instead of hessian(f)"),
    (r"pack_padded_sequence", "packed sequences take lengths on the host: run the padded rows and mask the padding"),
    (r"selective activation", "eager refuses that too: let its policy recompute what is written in place"),
    (r"_unique|nonzero|masked_select", "use torch.where or masks"),
    (r"deepcopy", "copy it by clone()"),
    (r"new Tensor subclass", "use plain tensors: as_subclass takes none of a trace"),
    (r"fabric\.backward", "capture model.module and optimizer.optimizer, and use torch.autocast in the loss function"),
)
_CHOICES = (torch.ops.aten.topk.default, torch.ops.aten.argmax.default)
_ANY_FIX = (
    "run the step in eager: if it fails too, fix the model or the batch; if not, wrap what torch cannot trace in "
    "torch.library.custom_op, or compute it outside and pass it in the batch"
)


@contextlib.contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    """Raise what fails inside as `CaptureError`, with module path and source line.

    An error that Python raises on a line of the user's own, such as KeyError, is eager's as well: it keeps its type and
    gets a note. So does running out of memory.
    """
    try:
        yield
    except (CaptureError, RunAgain, Again, DrawsFound, torch.OutOfMemoryError):
        raise
    except Exception as error:
        operator = compat.operator_needing_values(error)
        path, source = recorder.stack[-1] if recorder.stack else "", user_source(error)
        in_backward = recorder.phase == "backward" and recorder.origin is not None
        if in_backward:  # autograd runs it: the line is that of the forward
            path, source = recorder.origin.path, recorder.origin.source
        where = f"cannot capture {path or 'the model'} at {source or 'loss_fn'}"
        if operator is not None:
            what, fix = _needs_value(recorder, path, operator, in_backward)
            raise CaptureError(f"{where}: {what}; {fix}") from error
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        called = [code.co_name for code in codes if code.co_filename.endswith("distributed_c10d.py")]
        if names := [name for name in called if name != "wrapper"]:
            raise CaptureError(
                f"{where}: torch.distributed.{names[0]} changes its arguments in place, unseen by a trace; use "
                "torch.distributed._functional_collectives, whose functions return tensors"
            ) from error
        if _is_users(error):
            error.add_note(f"raised in {path or 'the model'} ({source}) while the step was traced, with tensors that "
                           "have shapes and no values")  # fmt: skip
            raise
        said = f"{type(error).__name__}: {first_line(error)}"
        raise TraceError(f"{where}: {said}; {_fix(said)}") from error


def _is_users(error: Exception) -> bool:
    """Whether code of the user's own raises ``error``, and not torch in its name."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return is_user_file(frame.f_code.co_filename) and not isinstance(error, RuntimeError)


def _fix(said: str, default: str = _ANY_FIX) -> str:
    return next((fix for pattern, fix in _FIXES if re.search(pattern, said)), default)


def _needs_value(recorder: Recorder, path: str, operator: str, in_backward: bool) -> tuple[str, str]:
    """(what ``operator`` asks for, what to do)."""
    module = recorder.model.get_submodule(path)
    needs = f"{operator} needs a tensor's value while the step is traced without values"
    needs += " (.item(), bool(tensor), nonzero and the like)"
    if operator == ".data_ptr()":
        asks = f"{operator} asks for a tensor's address, which a trace does not have, as launches outside Triton do"
        return asks, "make the launch an operator by torch.library.custom_op"
    named = "expert" in f"{path}.{type(module).__name__}".lower()
    if named or _is_routed(recorder.latest):
        which = "asks which experts have tokens, to call them one by one"
        chosen = "needs a tensor's value: what a topk or argmax chose, as a loop over experts does"
        asks = f"{operator} {which if named else chosen}"
        if getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager":
            return asks, 'set model.set_experts_implementation("grouped_mm")'
        return asks, (
            f"write {type(module).__name__}.forward by stepgraph.kernels.moe, as docs/capture.md shows, or give each "
            "expert all tokens and weight its result by 0 where it was not chosen"
        )
    if "dynamic" in str(getattr(module, "rope_type", "")):
        return f"{operator} asks whether a batch is longer than all before", (
            "a dynamic RoPE takes its frequencies from the longest batch so far, which Python keeps: raise "
            "config.max_position_embeddings to the longest one, or use another rope_type, such as linear or yarn"
        )
    if getattr(module, "momentum", 0.1) is None:
        return needs, "momentum=None averages by a count that the host reads: use a number, such as momentum=0.1"
    if name := _layerdrop(recorder.model, path):
        return needs, f"if it asks whether LayerDrop leaves out a layer, set {name}"
    if _is_drawn(recorder.latest):
        return needs, (
            "draw it outside and pass it in the batch as a number; for LayerDrop, set its probability to 0; peft's "
            "LoHa and LoKr, which ask whether a number exceeds 0, need passes other than exact"
        )
    if type(module).__module__.startswith("peft."):
        return needs, "this adapter of peft decides by values: use another one, such as LoRA or DoRA"
    if in_backward:
        return needs, "in its backward: write x[mask] = y as torch.where(mask, y, x)"
    if any(map(compat.is_traceable_wrapper_subclass, recorder.model.parameters())):
        return needs, (
            "over a mesh Python may read no value of a batch, such as the grids of images: ranks, whose batches "
            "differ, would run different graphs; use torch.where or masks, or train on one GPU"
        )
    fix = _fix(operator, "use torch.where or masks, or pass what the host decides in the batch as a number")
    return needs, fix if path or "scalar" not in operator else f"{fix}; if it is only logged, capture(..., replay=True)"


def _is_routed(node: fx.Node | None) -> bool:
    """Whether ``node`` follows within a few operators from the largest of some numbers, as a router's choice does."""
    pending = [node] if node is not None else []
    for seen in pending:
        if seen.target in _CHOICES:
            return True
        pending += [source for source in seen.all_input_nodes if source not in pending][: 16 - len(pending)]
    return False


def _is_drawn(node: fx.Node | None) -> bool:
    """Whether ``node`` is computed from random numbers alone."""
    while node is not None and not is_random(node):
        node = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
    return node is not None


def _layerdrop(model: nn.Module, path: str) -> str | None:
    """The name of a probability to leave out layers that the module at ``path``, or one around it, has."""
    parts = path.split(".") if path else []
    for i in range(len(parts), -1, -1):
        outer = ".".join(parts[:i])
        module = model.get_submodule(outer)
        for kind, owner in (("", module), ("config.", getattr(module, "config", None))):
            for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
                if getattr(owner, name, 0):
                    alike = [path for path, module in model.named_modules() if not kind and getattr(module, name, 0)]
                    return f"{kind}{name} = 0 of {' and '.join(path or 'the model' for path in alike or [outer])}"
    return None
