"""Attention by kernels that torch does not have."""

from stepgraph.kernels.attention.documents import attend_documents
from stepgraph.kernels.attention.flash4 import flash4_attention, flash4_attention_backward, installed, unavailable
