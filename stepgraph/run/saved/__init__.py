"""Saved steps: what one start of a program captured, rewrote and compiled, and the next one loads.

What is saved, graph by graph:
- The **graph** after all passes, as JSON of our own: nodes with operators by name and schema, arguments, provenance and
  role, and the form of each value (shape, strides, dtype, device, which storage). Constants that passes and literals
  made are bytes beside it. What no form is known for is refused at saving, in one line (`NotSavable`).
- The **bindings**, by kind and name: they are tied to the live tensors of the model and its optimizers when the graph
  is loaded. Nothing of a tensor's values is saved, so random state, weights and optimizer state are those of the run.
- The **pieces** that Inductor compiled, in torch's own artifact format, with the names of the nodes each stands for.
- The **reports** of the passes, and the schedule of calls.

Where a step is found. Two keys, each in named parts, so that a miss says which one differs:
- the *graph*: the text of the captured program, the passes with their options, versions, device, settings and mesh.
  The step is captured again, and neither rewritten nor compiled. Tensors that the model keeps outside parameters and
  buffers, and launches of Triton kernels, are taken from that capture.
- the *start*: instead of the graph's text, all that the capture reads: model, loss, batch, optimizer and step options,
  every source file that the trace went through, and the global values, environment variables and files that its
  functions read (`stepgraph.run.saved.reads`). Nothing is captured.
  Where a part cannot be described in full, such as a model that launches kernels of its own, there is no such key, and
  the reason is told.

Safety. A saved step is code: torch's artifacts hold pickles and sources that run when they are loaded, with all rights
of this process. Nothing else here does: JSON and bytes alone. So the files of an entry are hashed in a manifest, whose
first line is its own hash, and all of them are compared before the first is used. That tells damage, not forgery:
against that, entries are read only from folders that belong to this user and that no other may write, or that the
caller names. An entry is written aside and renamed whole; of two writers the second finds it there and leaves its own.
"""

from stepgraph.run.saved.folder import DamagedEntry, Folder, UnsafeFolder, cache_folder
from stepgraph.run.saved.values import NotSavable
