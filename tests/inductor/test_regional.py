"""Regions compiled with Inductor on a CPU: their own options, once for each structure, close to eager, kept on disk."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph
from stepgraph import compat
from stepgraph.inductor.regional import Region, compile_pieces, structure, tag
from stepgraph.models import Golf, GolfConfig, Llama3, Llama3Config, next_token_loss
from stepgraph.passes import configured
from stepgraph.passes.gather import gather
from stepgraph.train.trainer import example_batch  # noqa: F401


def graph_of(function, *inputs):
    """``function`` as a flat graph, and its operators in order."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    return module, [node for node in module.graph.nodes if node.op == "call_function"]
