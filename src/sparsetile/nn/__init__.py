"""Graph layers with PyG's constructors, state dicts and results, and block-sparse linear layers.

>>> import torch
>>> from sparsetile.nn import GCNConv
>>> x, edge_index = torch.randn(3, 64), torch.tensor([[0, 1, 2], [1, 2, 0]])
>>> conv = GCNConv(64, 16)
>>> conv(x, edge_index).shape
torch.Size([3, 16])

Messages flow from ``edge_index[0]`` to ``edge_index[1]`` (``flow="source_to_target"``), so layers
multiply by A[target, source]. They do not need PyG.
"""

from __future__ import annotations

from sparsetile.nn import edge_operators as edge_operators  # registers what is traced
from sparsetile.nn.adapters import lora_config
from sparsetile.nn.attention import attention_blocks, sparse_attention, use_sparse_attention_
from sparsetile.nn.cache import clear_graph_cache
from sparsetile.nn.calibration import calibrate
from sparsetile.nn.captured import captured
from sparsetile.nn.cheb import ChebConv
from sparsetile.nn.experts import split_experts_
from sparsetile.nn.gat import GATConv
from sparsetile.nn.gatv2 import GATv2Conv
from sparsetile.nn.gcn import GCNConv, gcn_plan
from sparsetile.nn.gin import GINConv
from sparsetile.nn.gine import GINEConv
from sparsetile.nn.graph_conv import GraphConv
from sparsetile.nn.hetero import to_hetero
from sparsetile.nn.joined import join_projections_
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.masked_linear import MaskedLinear
from sparsetile.nn.masks import pattern_of
from sparsetile.nn.neighbours import aggregate
from sparsetile.nn.pretrained import enable_from_pretrained
from sparsetile.nn.report import report
from sparsetile.nn.rgcn import FastRGCNConv, RGCNConv
from sparsetile.nn.sage import SAGEConv
from sparsetile.nn.schedule import PruneSchedule
from sparsetile.nn.sparse_config import SparseConfig
from sparsetile.nn.sparse_files import load_sparse_
from sparsetile.nn.sparsify import densify_, sparsify_
from sparsetile.nn.swiglu import SparseSwiGLU
from sparsetile.nn.transformer import TransformerConv

__all__ = [
    "ChebConv", "FastRGCNConv", "GATConv", "GATv2Conv", "GCNConv", "GINConv", "GINEConv",
    "GraphConv", "MaskedLinear", "PruneSchedule", "RGCNConv", "SAGEConv", "SparseConfig",
    "SparseLinear", "SparseSwiGLU", "TransformerConv", "aggregate", "attention_blocks", "calibrate",
    "captured", "clear_graph_cache", "densify_", "enable_from_pretrained", "gcn_plan",
    "join_projections_", "load_sparse_", "lora_config", "pattern_of", "report", "sparse_attention",
    "sparsify_", "split_experts_", "to_hetero", "use_sparse_attention_",
]  # fmt: skip
