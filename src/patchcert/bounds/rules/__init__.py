"""One short rule per operation; importing this package fills the table of `lowering`."""

from patchcert.bounds.rules import activations as activations
from patchcert.bounds.rules import affine as affine
from patchcert.bounds.rules import pooling as pooling
from patchcert.bounds.rules import structure as structure
