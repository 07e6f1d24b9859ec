"""Every private torch import and every difference between torch versions, once.

Supported: torch 2.11 to 2.15. Other rooms read the public names of these files as ``compat.NAME``, and import nothing
from torch itself that starts with an underscore. A comment next to each version difference names the versions that it
concerns.
"""

# isort: off
from stepgraph.compat.versions import TORCH  # first: it says in one line what an older torch would fail on

# isort: on
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode, is_fake
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from stepgraph.compat.compiler import *
from stepgraph.compat.distributed import *
from stepgraph.compat.eager import *
from stepgraph.compat.fake import *
from stepgraph.compat.lengths import *
from stepgraph.compat.memory import *
from stepgraph.compat.modules import *
from stepgraph.compat.optimizer import *
from stepgraph.compat.pipelining import *
from stepgraph.compat.repeated import *
from stepgraph.compat.replaced import *
from stepgraph.compat.tracing import *
from stepgraph.compat.triton import *
