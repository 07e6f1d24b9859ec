"""Saved steps: one start of a program saves what it rewrote and compiled, and the next start loads it.

What is saved, graph by graph:
- The **graph** after all passes, pickled node by node (`stepgraph.inductor.packed`): operators by name and schema,
  arguments, provenance and role, and the form of each value (shape, strides, dtype, device, which storage). Constants
  that passes and literals made are bytes. A value without a saved form is refused when the step is saved
  (`NotSavable`).
- The **bindings**, by kind and name: loading ties them to the tensors of the capture. No value of a tensor is saved:
  weights, optimizer state and random state are the run's.
- The **pieces** that Inductor compiled, in torch's own artifact format, with the names of the nodes in each.
- The **reports** of the passes, and the schedule of calls.

The key. Every start traces the step. The key is the text of the traced graphs and everything that decides what passes
and compilers make of them (`stepgraph.run.saved.key`). Whatever the model, the loss or the optimizer read in Python
either shows in the traced graphs or had no effect on the step, so nothing about them is guessed. A step for which this
would not hold (passes from outside of stepgraph, an operator whose kernels Inductor compiles without showing them in
the graph) is not saved, with the reason in one line.

Safety. A saved step is code: pickles and torch's artifacts run when they are loaded, with all rights of this process. A
manifest holds the hash of each file, its first line is its
own hash, and all are compared before the first file is used. That finds damage, not forgery: entries are therefore read
only from folders that belong to this user and that nobody else may write, or that the caller names. An entry is written
under another name and then renamed; a second writer of the same entry finds it there and discards its own.
"""

from stepgraph.inductor.packed import NotSavable
from stepgraph.run.saved.folder import DamagedEntry, Folder, UnsafeFolder, cache_folder
