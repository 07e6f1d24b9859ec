"""Data and tensor parallelism, applied to a plain model from outside; its collectives become graph nodes."""

from stepgraph.parallel.apply import parallelize
from stepgraph.parallel.fsdp import layouts
from stepgraph.parallel.init import local_parts, round_to
from stepgraph.parallel.loss import cross_entropy, mean_over_mesh, next_token_loss
from stepgraph.parallel.mesh import Mesh, MeshSpec
from stepgraph.parallel.tensor import STYLES
from stepgraph.parallel.world import job_store, launched, leave, started, world_size
