"""Data, tensor and pipeline parallelism, applied to a plain model from outside; its collectives become graph nodes."""

from stepgraph.parallel.alike import check_collectives, check_model
from stepgraph.parallel.apply import held_parameters, parallelize
from stepgraph.parallel.fsdp import layouts, leave_padding_out, local_parts, round_to, whole_state, whole_tensor
from stepgraph.parallel.loss import cross_entropy, mean_over_mesh, next_token_loss
from stepgraph.parallel.mesh import Mesh, MeshSpec
from stepgraph.parallel.pipeline import SCHEDULES, Pipeline, StageGraphs, check_schedule, plan_pipeline
from stepgraph.parallel.placement import Placement, placement_of
from stepgraph.parallel.tensor import STYLES
from stepgraph.parallel.world import (
    gloo_group,
    in_own_process,
    job_store,
    launched,
    leave,
    says_first,
    started,
    starts_again,
    world_size,
)
