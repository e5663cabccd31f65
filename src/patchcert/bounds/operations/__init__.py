"""The operations that networks are made of. Each states, side by side, all that is known of it: its value, its interval
bound and its linear bound with rounding, which outputs see which inputs, and which layers and functions of PyTorch are
lowered to it.

Weights are read from the layer at every call, so bounds can be differentiated and trained through.
"""

from patchcert.bounds.operations.activations import STRETCHES as STRETCHES
from patchcert.bounds.operations.activations import Monotone as Monotone
from patchcert.bounds.operations.activations import Softplus as Softplus
from patchcert.bounds.operations.activations import Valley as Valley
from patchcert.bounds.operations.activations import is_relu as is_relu
from patchcert.bounds.operations.activations import precisely as precisely
from patchcert.bounds.operations.affine import SCALE_ROUNDINGS as SCALE_ROUNDINGS
from patchcert.bounds.operations.affine import Affine as Affine
from patchcert.bounds.operations.affine import ChannelScale as ChannelScale
from patchcert.bounds.operations.affine import Convolution as Convolution
from patchcert.bounds.operations.affine import Linear as Linear
from patchcert.bounds.operations.affine import TransposedConvolution as TransposedConvolution
from patchcert.bounds.operations.arithmetic import RESCALE_ROUNDINGS as RESCALE_ROUNDINGS
from patchcert.bounds.operations.arithmetic import Add as Add
from patchcert.bounds.operations.arithmetic import Multiply as Multiply
from patchcert.bounds.operations.arithmetic import Rescale as Rescale
from patchcert.bounds.operations.base import ANY_NUMBER as ANY_NUMBER
from patchcert.bounds.operations.base import Elementwise as Elementwise
from patchcert.bounds.operations.base import Exact as Exact
from patchcert.bounds.operations.base import Interval as Interval
from patchcert.bounds.operations.base import Operation as Operation
from patchcert.bounds.operations.pooling import AdaptiveMaxPool as AdaptiveMaxPool
from patchcert.bounds.operations.pooling import AveragePool as AveragePool
from patchcert.bounds.operations.pooling import MaxPool as MaxPool
from patchcert.bounds.operations.pooling import equal_weights as equal_weights
from patchcert.bounds.operations.shaping import Concatenate as Concatenate
from patchcert.bounds.operations.shaping import ExpandAs as ExpandAs
from patchcert.bounds.operations.shaping import Moved as Moved
from patchcert.bounds.operations.shaping import Part as Part
from patchcert.bounds.operations.shaping import Permute as Permute
from patchcert.bounds.operations.shaping import Reshape as Reshape
from patchcert.bounds.operations.shaping import ZeroPad as ZeroPad
