"""The dialect: every operator ``fxround::...`` of a lowered graph, declared once.

A graph node carries its whole arithmetic in its arguments: a program or a rounding as text, the run-time tensor ``rng``
= (seed, sample), and the number of the node. An operator is a class whose fields are its arguments. Its schema, its
fake counterpart, the node that a pass writes and the view that a reader gets come from this class. Calls are pure, and
results are row-major whatever the operands' strides. ``runtime.torch_ops`` attaches the kernels of a device.

    become(graph, node, Matmul(a, b, "binary32/stochastic/inf", "binary32/nearest_even/inf", rng, 7))
    read(node).accumulate  # 'binary32/stochastic/inf'
"""

from fxround.graph.dialect.blocks import (
    BlockExpand,
    BlockMaximum,
    BlockPercentile,
    BlockSum,
    HadamardTransform,
    block_sizes,
)
from fxround.graph.dialect.call import CALLS, LIBRARY, NAMESPACE, STATE, Call, T, read, require_state
from fxround.graph.dialect.contractions import (
    CONTRACTIONS,
    ContractionCall,
    Convolution,
    ConvolutionInputGradient,
    ConvolutionWeightGradient,
    Matmul,
)
from fxround.graph.dialect.lengths import PackedLengths
from fxround.graph.dialect.loops import (
    BODIES,
    COND,
    MAP,
    SCAN,
    WHILE,
    Iterations,
    Loop,
    graphs_of,
    is_loop,
    loops_of,
    read_loop,
)
from fxround.graph.dialect.maps import FUSED, MAPS, POINTWISE, Fused, Pointwise, ProgramCall, read_map
from fxround.graph.dialect.processes import AddProcesses, StateOfPart, draws_in_parts
from fxround.graph.dialect.reductions import Cumprod, Cumsum, Prod, ReductionCall, ScanCall, Sum
from fxround.graph.dialect.scatters import IndexPut, ScatterAdd, ScatterCall

__all__ = [
    "BODIES",
    "CALLS",
    "COND",
    "CONTRACTIONS",
    "FUSED",
    "LIBRARY",
    "MAP",
    "MAPS",
    "NAMESPACE",
    "POINTWISE",
    "SCAN",
    "STATE",
    "WHILE",
    "AddProcesses",
    "BlockExpand",
    "BlockMaximum",
    "BlockPercentile",
    "BlockSum",
    "Call",
    "ContractionCall",
    "Convolution",
    "ConvolutionInputGradient",
    "ConvolutionWeightGradient",
    "Cumprod",
    "Cumsum",
    "Fused",
    "HadamardTransform",
    "IndexPut",
    "Iterations",
    "Loop",
    "Matmul",
    "PackedLengths",
    "Pointwise",
    "Prod",
    "ProgramCall",
    "ReductionCall",
    "ScanCall",
    "ScatterAdd",
    "ScatterCall",
    "StateOfPart",
    "Sum",
    "T",
    "block_sizes",
    "draws_in_parts",
    "graphs_of",
    "is_loop",
    "loops_of",
    "read",
    "read_loop",
    "read_map",
    "require_state",
]
