"""The operations that networks are made of. Each states, side by side, all that is known of it: its value, its interval
bound with rounding, which outputs see which inputs, and which layers and functions of PyTorch are lowered to it.

Weights are read from the layer at every call, so bounds can be differentiated and trained through.
"""

from patchcert.bounds.operations.activations import Monotone as Monotone
from patchcert.bounds.operations.activations import is_relu as is_relu
from patchcert.bounds.operations.affine import Affine as Affine
from patchcert.bounds.operations.affine import ChannelScale as ChannelScale
from patchcert.bounds.operations.affine import Convolution as Convolution
from patchcert.bounds.operations.affine import Linear as Linear
from patchcert.bounds.operations.base import Interval as Interval
from patchcert.bounds.operations.base import Operation as Operation
from patchcert.bounds.operations.base import Source as Source
from patchcert.bounds.operations.pooling import AveragePool as AveragePool
from patchcert.bounds.operations.pooling import MaxPool as MaxPool
from patchcert.bounds.operations.structure import Add as Add
from patchcert.bounds.operations.structure import Reshape as Reshape
