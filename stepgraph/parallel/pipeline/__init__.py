"""Pipelines: a model cut into stages that several ranks have, and the schedule that runs them."""

from stepgraph.parallel.pipeline.layout import Pipeline, pipeline_of, plan_pipeline
from stepgraph.parallel.pipeline.program import StageGraphs, staged_program
from stepgraph.parallel.pipeline.schedules import SCHEDULES, check_schedule
