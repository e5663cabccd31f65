"""What an attacker may do to an image. Knows nothing of networks."""

from patchcert.threats import shapes as shapes
from patchcert.threats.patch import AnyThreat as AnyThreat
from patchcert.threats.patch import Patch as Patch
from patchcert.threats.patch import Patches as Patches
from patchcert.threats.patch import threat_from_dict as threat_from_dict
from patchcert.threats.placements import Placements as Placements
from patchcert.threats.sparse import SparsePixels as SparsePixels
from patchcert.threats.threat import Threat as Threat
